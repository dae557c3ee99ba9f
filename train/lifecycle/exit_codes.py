"""Exit codes of a training process, which tell launchers whether to start it again.

After STOPPED, `launch/train.sbatch` requeues its job, and `launch.local` ends, because somebody
asked it to. Neither restarts after FINISHED, REFUSED, DIVERGED or UNSAVED. After any other code,
which means a crash, they restart a limited number of times. A process that a signal of
train/lifecycle/stop_signals.py ends before it handles signals counts as STOPPED.
"""

FINISHED = 0
#: A crash, or a temporary problem at the start: a file system, or a process that did not appear.
FAILED = 1
#: An error before step 0, reported in one sentence; another start would fail in the same way.
REFUSED = 2
#: Too many steps in a row were not finite; the rows of the last one are saved. EX_SOFTWARE.
DIVERGED = 70
#: The last step, or the step at which a signal arrived, could not be saved. EX_IOERR of sysexits.h.
UNSAVED = 74
#: A signal arrived before the last step, and the run saved, or had nothing to save; the next start
#: resumes. EX_TEMPFAIL.
STOPPED = 75
#: A step, or a wait for data or another process, took longer than train.failure_timeout_s.
HUNG = 76

#: Exit codes after which a restart from the last checkpoint is useless.
FINAL = (FINISHED, REFUSED, DIVERGED, UNSAVED)

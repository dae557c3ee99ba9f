"""How a training process ends, for whoever starts it. Other codes are crashes.

What `launch/train.sbatch` and `launch.local` do: STOPPED is started again, FINISHED, REFUSED,
DIVERGED and UNSAVED are not; all else is started again a few times.
"""

FINISHED = 0
#: A crash, or at the start something that may pass: a file system, or a process that did not come.
FAILED = 1
#: An error before step 0, said in one sentence: another start would end alike.
REFUSED = 2
#: Too many steps in a row were not finite; the rows of the last are saved. EX_SOFTWARE.
DIVERGED = 70
#: The last step, or that at which a signal came, could not be saved. EX_IOERR of sysexits.h.
UNSAVED = 74
#: A signal came before the last step, and the run saved; the next start goes on. EX_TEMPFAIL.
STOPPED = 75
#: A step, or a wait for data or another process, took longer than train.failure_timeout_s.
HUNG = 76

#: After these a start from the last checkpoint changes nothing.
FINAL = (FINISHED, REFUSED, DIVERGED, UNSAVED)

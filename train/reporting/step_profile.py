"""Profiles a few steps of a run with jax's profiler, for XProf and Perfetto.

WORKDIR/profile/process_0/plugins/profile/steps_10_13/   HOST.xplane.pb           for XProf
perfetto_trace.json.gz   for Perfetto
"""

import contextlib
import logging
from pathlib import Path

import jax

#: The folder of profiles in a workdir.
PROFILE_DIRECTORY = "profile"

_log = logging.getLogger(__name__)


class StepProfile:
    """The profile of `log.profile_steps`, on the first process of each pipeline stage.

    Processes of the same stage do the same work, so one profile of each stage is enough. A profile
    that cannot be written is a warning; the run goes on.

    Args:
        steps: first and last step; empty for none.
    """

    def __init__(self, steps: tuple[int, ...], workdir: Path, mesh: jax.sharding.Mesh):
        process = jax.process_index()
        first_processes = {stage.flat[0].process_index for stage in mesh.devices}
        self._steps = range(0)
        if steps and process in first_processes:
            first, last = steps
            self._steps = range(first, last + 1)
        self._directory = workdir / PROFILE_DIRECTORY / f"process_{process}"
        self._is_running = False

    def begins_at(self, step: int) -> bool:
        """Return whether to call `begin` before a step.

        A run that resumes within the steps profiles the rest of them.
        """
        return not self._is_running and step in self._steps

    def ends_at(self, step: int) -> bool:
        """Return whether to call `end` after a step."""
        return self._is_running and step == self._steps[-1]

    def begin(self) -> None:
        """Start the profiler; call it when the devices have nothing to do."""
        options = jax.profiler.ProfileOptions()
        options.session_id = f"steps_{self._steps[0]}_{self._steps[-1]}"
        options.python_tracer_level = 0  # recording each call of a function slows the host down
        try:
            # Now: if the profiler failed at the end, jax would not start it again.
            self._directory.mkdir(parents=True, exist_ok=True)
            jax.profiler.start_trace(
                str(self._directory), create_perfetto_trace=True, profiler_options=options
            )
            self._is_running = True
        except Exception as error:  # for example, a notebook is being profiled already
            self._give_up(error)

    def end(self) -> None:
        """Write the profile, if one is running; call it when the devices have nothing to do."""
        if not self._is_running:
            return
        self._is_running = False
        try:
            jax.profiler.stop_trace()
            _log.info(
                "profile of steps %d to %d: %s; docs/profiling.md says how to open it",
                self._steps[0],
                self._steps[-1],
                self._directory,
            )
        except Exception as error:  # the profiler raises many types
            self._give_up(error)

    def annotate(self, step: int) -> contextlib.AbstractContextManager[object]:
        """Return a context in which the profiler sees a step."""
        if not self._is_running:
            return contextlib.nullcontext()
        return jax.profiler.StepTraceAnnotation("train", step_num=step)

    def _give_up(self, error: Exception) -> None:
        self._steps = range(0)
        _log.warning("no profile: %s: %s", type(error).__name__, error)

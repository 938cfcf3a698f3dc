"""What ends a measurement of scripts/bench_transfer.py that could have worked."""


class MeasurementFailed(RuntimeError):
    """There are no figures: a process ended, or what arrived is not what was sent."""


class TransferFailed(MeasurementFailed):
    """A cache did not arrive over one transport; the others may do better."""

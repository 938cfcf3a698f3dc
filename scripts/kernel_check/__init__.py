"""What scripts/gpu_check.py is made of: the ops at GLM-5.2's sizes, how each is compared and timed, and the report."""

"""The machines that steps are predicted for: GPUs, hosts and networks."""

"""What people plug into their own loop: torch and numpy, nothing else."""

"""What every folder stands on: errors, files, jobs, and how hot loops run."""

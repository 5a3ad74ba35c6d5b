"""What every package uses: errors, files, jobs, and how hot loops run."""

"""Shared by all packages: errors, files, jobs, and the loading of hot loops."""

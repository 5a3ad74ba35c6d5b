"""Which what-ifs to try, what came of them, and what to do first."""

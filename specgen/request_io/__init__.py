"""Input lines to prompt rows, finished rows to output lines, and files that survive the job."""

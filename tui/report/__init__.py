"""Reports of runs and sweeps as HTML, from what the screens of the dashboard show."""

"""The report of one run as an HTML page, drawn from the files of its run directory."""

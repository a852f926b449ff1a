"""What a sweep leaves in its folder: tables as files, plots, and one page that opens offline."""

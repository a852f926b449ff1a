"""What a sweep leaves behind: tables as files, plots and one page that opens offline."""

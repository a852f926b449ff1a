"""The files of a sweep: tables, plots, and one page that opens offline."""

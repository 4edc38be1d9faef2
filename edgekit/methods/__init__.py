"""Methods: one file each over a public seam, found through entry points, as those of other packages are."""

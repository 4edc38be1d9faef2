"""Methods: one file each over a public seam, loaded through entry points like the methods of other packages."""

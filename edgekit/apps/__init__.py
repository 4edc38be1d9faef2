"""Apps: each uses edgekit as any program could, through its public names, and adds its commands by entry points."""

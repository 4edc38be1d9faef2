"""Plans for servers of several GPUs. A rank is priced as a smaller model, by the arithmetic used for devices."""

"""Plans for servers of several GPUs: a rank is a smaller model, priced by the same arithmetic as a device's."""

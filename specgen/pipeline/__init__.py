"""The batch engine: requests in, steps on the device, outputs and their statistics out."""

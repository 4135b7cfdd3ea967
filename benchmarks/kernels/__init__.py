"""The kernels themselves: the compile gate and tuning."""

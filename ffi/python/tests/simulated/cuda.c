/* What torch asks of the driver itself before it starts: libcuda.so.1 of a machine without one. */
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { (void)device; *flags = 0; *active = 1; return 0; }
int cuGetErrorString(int error, const char **text) { (void)error; *text = "simulated"; return 0; }

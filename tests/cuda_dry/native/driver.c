/* Names that torch and FBGEMM want of the driver and of NVML before they can be loaded: one source
 * for both libraries.
 *
 * No call succeeds but the question whether the device is in use, which torch asks before it has a
 * stream: nothing here may need a driver. 999 is both CUDA_ERROR_UNKNOWN and NVML_ERROR_UNKNOWN.
 */
#define REFUSED(name)                                                                              \
    int name(void) { return 999; }

int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    return *flags = 0, *active = 0;
}

REFUSED(cuInit)
REFUSED(cuDriverGetVersion)

REFUSED(nvmlInit_v2)
REFUSED(nvmlDeviceGetCount_v2)
REFUSED(nvmlDeviceGetHandleByIndex_v2)
REFUSED(nvmlDeviceGetNvLinkRemotePciInfo_v2)
REFUSED(nvmlDeviceGetNvLinkState)
REFUSED(nvmlDeviceGetPciInfo_v3)

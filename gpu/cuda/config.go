package cuda

// Config says which device to open.
type Config struct {
	// Library is the driver library; empty means libcuda.so.1 wherever the system's loader finds it.
	Library string
	// Ordinal is the number of the device as this process sees it.
	Ordinal int
}

// Report is what Probe found: for a person who asks why there is no device.
type Report struct {
	DriverVersion int      // of the API, such as 12080; 0 if the library did not say
	Missing       []string // entry points that this package needs and the driver lacks
	BatchCopies   bool     // cuMemcpyBatchAsync is there
	Devices       []DeviceReport
}

// DeviceReport describes one device.
type DeviceReport struct {
	Ordinal    int
	Name       string
	UUID       [16]byte
	TotalBytes int64
	Compute    string // such as "9.0"
	Units      int
	VMM        bool   // virtual memory calls: without them no pool can be made
	PosixFD    bool   // pools can be exported as descriptors
	Peers      []bool // by ordinal: whether this device can reach that one's memory
}

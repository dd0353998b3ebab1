package placement

import "strconv"

// sizeText is a size for people.
func sizeText(bytes int64) string {
	units := [...]string{" B", " KiB", " MiB", " GiB", " TiB", " PiB"}
	x, u := float64(bytes), 0
	for x >= 1024 && u < len(units)-1 {
		x, u = x/1024, u+1
	}
	precision := 1
	if u == 0 || x >= 100 {
		precision = 0
	}
	return strconv.FormatFloat(x, 'f', precision, 64) + units[u]
}

// loadText says how far a node is above or below its share.
func loadText(load float64) string {
	switch percent := int64(load*100 + 0.5); {
	case load < 0:
		return strconv.FormatInt(-int64(load*100-0.5), 10) + " % below its share"
	case percent == 0:
		return "at its share"
	default:
		return strconv.FormatInt(percent, 10) + " % above its share"
	}
}

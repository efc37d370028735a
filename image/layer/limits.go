package layer

// Limits bounds what an image may ask for. A zero field takes the default.
type Limits struct {
	Layers     int   // layers in an image
	LayerBytes int64 // uncompressed bytes of one layer's tar
	ImageBytes int64 // uncompressed bytes of all layers together
	Entries    int   // tar entries in all layers together
	Ratio      int64 // uncompressed to compressed, once RatioFloor bytes came out
	RatioFloor int64 // bytes
	PathBytes  int   // length of a name in a tar
	Depth      int   // directories on the way to a file
	MetaBytes  int64 // memory for the tree: inodes, names, link targets and attributes
}

// DefaultLimits allow any image that people really use: a million files,
// directories four thousand levels deep, tens of gigabytes.
var DefaultLimits = Limits{
	Layers:     512,
	LayerBytes: 32 << 30,
	ImageBytes: 48 << 30,
	Entries:    2_000_000,
	Ratio:      200,
	RatioFloor: 1 << 30,
	PathBytes:  32 << 10,
	Depth:      4200,
	MetaBytes:  1 << 30,
}

// WithDefaults returns l with defaults in place of zeros.
func (l Limits) WithDefaults() Limits {
	d := DefaultLimits
	def(&l.Layers, d.Layers)
	def(&l.LayerBytes, d.LayerBytes)
	def(&l.ImageBytes, d.ImageBytes)
	def(&l.Entries, d.Entries)
	def(&l.Ratio, d.Ratio)
	def(&l.RatioFloor, d.RatioFloor)
	def(&l.PathBytes, d.PathBytes)
	def(&l.Depth, d.Depth)
	def(&l.MetaBytes, d.MetaBytes)
	return l
}

func def[T int | int64](p *T, v T) {
	if *p <= 0 {
		*p = v
	}
}

package wire

// Method is what a control call asks for.
type Method uint8

// The control calls.
const (
	MPing Method = 1
)

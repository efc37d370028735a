package config

import (
	"fmt"
	"math"
	"reflect"
	"strconv"
	"strings"
	"time"
)

var units = []struct {
	suffix string
	factor float64
}{
	{"KiB", 1 << 10}, {"MiB", 1 << 20}, {"GiB", 1 << 30}, {"TiB", 1 << 40},
	{"kB", 1e3}, {"KB", 1e3}, {"MB", 1e6}, {"GB", 1e9}, {"TB", 1e12},
	{"Ki", 1 << 10}, {"Mi", 1 << 20}, {"Gi", 1 << 30}, {"Ti", 1 << 40},
	{"k", 1 << 10}, {"K", 1 << 10}, {"m", 1 << 20}, {"M", 1 << 20}, {"g", 1 << 30}, {"G", 1 << 30}, {"T", 1 << 40},
	{"B", 1},
}

// ParseSize reads a number of bytes: 512MiB, 10GB, 1.5g, or plain bytes. The
// one-letter units are powers of two, as docker has them.
func ParseSize(s string) (Size, error) {
	num, factor := strings.TrimSpace(s), 1.0
	for _, u := range units {
		if n, ok := strings.CutSuffix(num, u.suffix); ok {
			num, factor = strings.TrimSpace(n), u.factor
			break
		}
	}
	f, err := parseNumber(num)
	if err != nil || f*factor > math.MaxInt64/2 {
		return 0, fmt.Errorf("%q is not a size such as 512MiB or 10GiB", s)
	}
	return Size(f * factor), nil
}

// ParseCPU reads thousandths of a core from cores (0.5) or 500m.
func ParseCPU(s string) (CPU, error) {
	num, factor := strings.TrimSpace(s), 1000.0
	if n, ok := strings.CutSuffix(num, "m"); ok {
		num, factor = n, 1
	}
	f, err := parseNumber(num)
	if err != nil || f*factor > 1e9 {
		return 0, fmt.Errorf("%q is not a number of CPUs such as 2, 0.5 or 500m", s)
	}
	return CPU(math.Round(f * factor)), nil
}

// parseNumber reads a decimal number that is not negative; unlike ParseFloat it
// knows no hex, no infinity and no exponent.
func parseNumber(s string) (float64, error) {
	if s == "" || strings.Trim(s, "0123456789.") != "" {
		return 0, strconv.ErrSyntax
	}
	return strconv.ParseFloat(s, 64)
}

// ParseDuration reads a time that is not negative.
func ParseDuration(s string) (Duration, error) {
	d, err := time.ParseDuration(strings.TrimSpace(s))
	if err != nil || d < 0 {
		return 0, fmt.Errorf("%q is not a time such as 30s, 5m or 1h30m", s)
	}
	return Duration(d), nil
}

// D is the value as a time.Duration.
func (d Duration) D() time.Duration { return time.Duration(d) }

func (d Duration) String() string { return time.Duration(d).String() }

func (c CPU) String() string { return strconv.FormatInt(int64(c), 10) + "m" }

func (s Size) String() string {
	for _, u := range []struct {
		n    Size
		name string
	}{{1 << 40, "TiB"}, {1 << 30, "GiB"}, {1 << 20, "MiB"}, {1 << 10, "KiB"}} {
		if s >= u.n && s%u.n == 0 {
			return strconv.FormatInt(int64(s/u.n), 10) + u.name
		}
	}
	return strconv.FormatInt(int64(s), 10)
}

// setScalar gives a field the value that text stands for.
func setScalar(v reflect.Value, text string) error {
	var err error
	switch p := v.Addr().Interface().(type) {
	case *Size:
		*p, err = ParseSize(text)
	case *CPU:
		*p, err = ParseCPU(text)
	case *Duration:
		*p, err = ParseDuration(text)
	case *string:
		*p = text
	case *bool:
		switch strings.ToLower(text) {
		case "true":
			*p = true
		case "false":
			*p = false
		default:
			err = fmt.Errorf("%q is neither true nor false", text)
		}
	case *int:
		if *p, err = strconv.Atoi(text); err != nil {
			err = fmt.Errorf("%q is not a whole number", text)
		}
	default:
		err = fmt.Errorf("is not a single value")
	}
	return err
}

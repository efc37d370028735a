package cli

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// clean makes text safe for a terminal: what came from a sandbox or an image
// must not move the cursor or hide other text.
func clean(s string) string {
	return strings.Map(func(r rune) rune {
		if r == '\t' || unicode.IsPrint(r) {
			return r
		}
		return unicode.ReplacementChar
	}, s)
}

// marshal is the JSON that the API itself speaks, in a form that is the same
// every time (protojson varies its spaces on purpose).
func marshal(m proto.Message) (json.RawMessage, error) {
	b, err := protojson.MarshalOptions{}.Marshal(m)
	if err != nil {
		return nil, err
	}
	var out bytes.Buffer
	if err := json.Compact(&out, b); err != nil {
		return nil, err
	}
	return out.Bytes(), nil
}

// printJSON writes one object, indented.
func (a *app) printJSON(m proto.Message) error {
	b, err := marshal(m)
	if err != nil {
		return err
	}
	return a.writeJSON(b)
}

// printList writes an array of objects.
func printList[T proto.Message](a *app, list []T) error {
	out := make([]json.RawMessage, len(list))
	for i, m := range list {
		b, err := marshal(m)
		if err != nil {
			return err
		}
		out[i] = b
	}
	return a.writeJSON(out)
}

// writeJSON writes any value, indented.
func (a *app) writeJSON(v any) error {
	b, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return err
	}
	_, err = a.Out.Write(append(b, '\n'))
	return err
}

// printLine writes one object on one line, for streams.
func (a *app) printLine(m proto.Message) error {
	b, err := marshal(m)
	if err != nil {
		return err
	}
	_, err = a.Out.Write(append(b, '\n'))
	return err
}

// table writes rows in columns.
func (a *app) table(head []string, rows [][]string) error {
	w := tabwriter.NewWriter(a.Out, 0, 8, 2, ' ', 0)
	fmt.Fprintln(w, strings.Join(head, "\t"))
	for _, r := range rows {
		for i := range r {
			r[i] = strings.ReplaceAll(clean(r[i]), "\t", " ")
		}
		fmt.Fprintln(w, strings.Join(r, "\t"))
	}
	return w.Flush()
}

func ago(t *timestamppb.Timestamp) string {
	if t == nil {
		return "-"
	}
	return short(time.Since(t.AsTime()))
}

// short is a duration in its one or two largest units.
func short(d time.Duration) string {
	d = max(d, 0)
	switch {
	case d < time.Second:
		return strconv.FormatInt(d.Milliseconds(), 10) + "ms"
	case d < time.Minute:
		return strconv.Itoa(int(d.Seconds())) + "s"
	case d < time.Hour:
		return fmt.Sprintf("%dm%02ds", int(d.Minutes()), int(d.Seconds())%60)
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh%02dm", int(d.Hours()), int(d.Minutes())%60)
	default:
		return strconv.Itoa(int(d.Hours()/24)) + "d"
	}
}

func bytesText(n int64) string {
	for _, u := range []struct {
		n    float64
		name string
	}{{1 << 40, "TiB"}, {1 << 30, "GiB"}, {1 << 20, "MiB"}, {1 << 10, "KiB"}} {
		if float64(n) >= u.n {
			return strconv.FormatFloat(float64(n)/u.n, 'f', 1, 64) + " " + u.name
		}
	}
	return strconv.FormatInt(n, 10) + " B"
}

func command(argv []string) string {
	var b strings.Builder
	for i, s := range argv {
		if i > 0 {
			b.WriteByte(' ')
		}
		if s == "" || strings.ContainsAny(s, " \t\n\"'\\$&|;<>()*?`") {
			s = strconv.Quote(s)
		}
		b.WriteString(s)
		if b.Len() > 60 {
			return b.String()[:57] + "..."
		}
	}
	return b.String()
}

func orDash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

// printed writes text and tells a failure, such as a full disk.
func printed(w io.Writer, s string) error {
	_, err := io.WriteString(w, s)
	return err
}

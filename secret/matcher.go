package secret

// matcher finds many patterns at once in one pass over a stream, in time
// proportional to its length whatever the patterns and the stream are: the
// automaton of Aho and Corasick (1975), with edges in lists, for it has as many
// states as the patterns have bytes and few of them branch.
type matcher struct {
	nodes []node
	first [256]int32 // the root's edges
	puts  []string
	min   int // length of the shortest pattern
}

type node struct {
	child int32 // first of its children; 0: none
	next  int32 // next child of its parent; 0: none
	fail  int32 // the longest proper suffix that is a node
	depth int32
	end   int32 // length of the longest pattern that ends here; 0: none
	put   int32 // index of what replaces that one
	c     byte
}

// newMatcher is nil for no patterns. Of two with the same text the first counts.
func newMatcher(ps []pattern) *matcher {
	if len(ps) == 0 {
		return nil
	}
	m := &matcher{nodes: make([]node, 1), min: len(ps[0].find)}
	for _, p := range ps {
		at := int32(0)
		for i := range len(p.find) {
			n := m.edge(at, p.find[i])
			if n == 0 {
				n = int32(len(m.nodes))
				m.nodes = append(m.nodes, node{c: p.find[i], depth: int32(i + 1), next: m.nodes[at].child})
				m.nodes[at].child = n
				if at == 0 {
					m.first[p.find[i]] = n
				}
			}
			at = n
		}
		if at != 0 && m.nodes[at].end == 0 {
			m.nodes[at].end, m.nodes[at].put = int32(len(p.find)), int32(len(m.puts))
			m.puts = append(m.puts, p.put)
		}
		m.min = min(m.min, len(p.find))
	}
	// breadth first: a node's suffix is shorter than the node
	queue := make([]int32, 0, len(m.nodes))
	for n := m.nodes[0].child; n != 0; n = m.nodes[n].next {
		queue = append(queue, n)
	}
	for i := 0; i < len(queue); i++ {
		p := queue[i]
		for n := m.nodes[p].child; n != 0; n = m.nodes[n].next {
			f := m.step(m.nodes[p].fail, m.nodes[n].c)
			m.nodes[n].fail = f
			if m.nodes[n].end == 0 {
				m.nodes[n].end, m.nodes[n].put = m.nodes[f].end, m.nodes[f].put
			}
			queue = append(queue, n)
		}
	}
	return m
}

func (m *matcher) edge(at int32, c byte) int32 {
	if at == 0 {
		return m.first[c]
	}
	n := m.nodes[at].child
	for n != 0 && m.nodes[n].c != c {
		n = m.nodes[n].next
	}
	return n
}

func (m *matcher) step(at int32, c byte) int32 {
	for {
		if n := m.edge(at, c); n != 0 || at == 0 {
			return n
		}
		at = m.nodes[at].fail
	}
}

// span is a stretch of the stream that is hidden: patterns that overlap are one.
type span struct {
	start, end int64
	put        int32
}

// scrubber replaces a matcher's patterns in one stream. It holds back only what may
// be the beginning of a pattern, so at most the longest pattern's length.
//
// Where patterns do not overlap, what comes out is what strings.ReplaceAll makes
// of the whole. Where they do, the whole stretch is replaced once, by what belongs
// to the pattern that begins first (of those the longest): replacing one would
// leave pieces of the other.
type scrubber struct {
	m     *matcher
	at    int32
	base  int64  // offset in the stream of held[0]
	pos   int64  // offset of what comes next
	held  []byte // base to pos, except what is hidden already
	spans []span // not yet written, in order, apart from each other
}

// write appends to dst what is certain once chunk has come.
func (s *scrubber) write(dst, chunk []byte) []byte {
	m := s.m
	s.held = append(s.held, chunk...)
	at, start := s.at, s.pos
	for i := 0; i < len(chunk); i++ {
		if at == 0 {
			for i < len(chunk) && m.first[chunk[i]] == 0 {
				i++
			}
			if i == len(chunk) {
				break
			}
		}
		at = m.step(at, chunk[i])
		if n := &m.nodes[at]; n.end != 0 {
			end := start + int64(i) + 1
			s.found(span{end - int64(n.end), end, n.put})
		}
	}
	for at != 0 && m.nodes[at].child == 0 { // nothing goes on from here: only a suffix can
		at = m.nodes[at].fail
	}
	s.at, s.pos = at, start+int64(len(chunk))
	return s.settle(dst, s.pos-int64(m.nodes[at].depth))
}

// close appends the rest.
func (s *scrubber) close(dst []byte) []byte {
	s.at = 0
	return s.settle(dst, s.pos)
}

// found adds a span that ends after all others.
func (s *scrubber) found(n span) {
	for len(s.spans) > 0 {
		top := s.spans[len(s.spans)-1]
		if top.end <= n.start {
			break
		}
		if top.start < n.start {
			n.start, n.put = top.start, top.put
		}
		s.spans = s.spans[:len(s.spans)-1]
	}
	s.spans = append(s.spans, n)
}

// settle writes what lies before limit, before which no pattern can begin any more.
func (s *scrubber) settle(dst []byte, limit int64) []byte {
	done := 0
	plain := func(to int64) {
		if to > s.base {
			dst = append(dst, s.held[:to-s.base]...)
			s.drop(to)
		}
	}
	for _, sp := range s.spans {
		if sp.end > limit {
			break
		}
		plain(sp.start)
		dst = append(dst, s.m.puts[sp.put]...)
		s.drop(sp.end)
		done++
	}
	s.spans = s.spans[:copy(s.spans, s.spans[done:])]
	if len(s.spans) > 0 && s.spans[0].start < limit {
		plain(s.spans[0].start)
		s.drop(limit) // hidden
	} else {
		plain(limit)
	}
	if len(s.held) == 0 {
		s.held = nil
	} else if cap(s.held) > 2*len(s.held)+4096 {
		s.held = append([]byte(nil), s.held...)
	}
	return dst
}

// drop forgets what lies before offset to.
func (s *scrubber) drop(to int64) {
	if to > s.base {
		s.held = s.held[to-s.base:]
		s.base = to
	}
}

// replace is for a whole text.
func (m *matcher) replace(s string) string {
	if len(s) < m.min {
		return s
	}
	w := scrubber{m: m}
	return string(w.close(w.write(nil, []byte(s))))
}

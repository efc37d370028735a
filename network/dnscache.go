package network

import (
	"container/list"
	"sync"
	"time"

	"github.com/miekg/dns"
)

// Bounds of the DNS cache.
const (
	cacheMaxSize     = 4096 // bytes of a packed answer; larger ones are not kept
	cacheMaxTTL      = time.Hour
	cacheMaxNegative = 5 * time.Minute
	// cacheFailure keeps a failing name from being asked about over and over.
	cacheFailure = 2 * time.Second
)

type cacheKey struct {
	name  string // canonical
	qtype uint16
}

type cacheEntry struct {
	key      cacheKey
	packed   []byte
	filtered bool
	stored   time.Time
	expires  time.Time
}

// dnsCache holds the most recently used answers, shared by all slots: they are
// the same for all.
type dnsCache struct {
	mu      sync.Mutex
	max     int
	entries map[cacheKey]*list.Element
	lru     *list.List // of *cacheEntry, latest first
}

func newDNSCache(n int) *dnsCache {
	return &dnsCache{max: n, entries: map[cacheKey]*list.Element{}, lru: list.New()}
}

// get returns a fresh copy with the TTLs counted down, or nil.
func (c *dnsCache) get(k cacheKey, now time.Time) *reply {
	c.mu.Lock()
	el := c.entries[k]
	if el == nil {
		c.mu.Unlock()
		return nil
	}
	e := el.Value.(*cacheEntry)
	if !now.Before(e.expires) {
		c.lru.Remove(el)
		delete(c.entries, k)
		c.mu.Unlock()
		return nil
	}
	c.lru.MoveToFront(el)
	c.mu.Unlock()
	r := &reply{filtered: e.filtered}
	if r.Unpack(e.packed) != nil {
		return nil
	}
	age := uint32(now.Sub(e.stored) / time.Second)
	for _, rrs := range [][]dns.RR{r.Answer, r.Ns} {
		for _, rr := range rrs {
			h := rr.Header()
			h.Ttl -= min(h.Ttl, age)
		}
	}
	return r
}

func (c *dnsCache) put(k cacheKey, r *reply, now time.Time) {
	ttl := lifetime(r)
	if ttl <= 0 {
		return
	}
	m := r.Copy()
	m.Compress = true
	b, err := m.Pack()
	if err != nil || len(b) > cacheMaxSize {
		return
	}
	e := &cacheEntry{key: k, packed: b, filtered: r.filtered, stored: now, expires: now.Add(ttl)}
	c.mu.Lock()
	defer c.mu.Unlock()
	if el := c.entries[k]; el != nil {
		el.Value = e
		c.lru.MoveToFront(el)
		return
	}
	for len(c.entries) >= c.max {
		last := c.lru.Back()
		delete(c.entries, last.Value.(*cacheEntry).key)
		c.lru.Remove(last)
	}
	c.entries[k] = c.lru.PushFront(e)
}

// lifetime is how long an answer may be kept (RFC 2308 for negative ones).
func lifetime(r *reply) time.Duration {
	switch {
	case r.filtered:
		return 10 * time.Second
	case r.Rcode != dns.RcodeSuccess && r.Rcode != dns.RcodeNameError:
		return cacheFailure
	case len(r.Answer) > 0:
		ttl := uint32(cacheMaxTTL / time.Second)
		for _, rr := range r.Answer {
			ttl = min(ttl, rr.Header().Ttl)
		}
		return time.Duration(ttl) * time.Second
	}
	for _, rr := range r.Ns {
		if soa, ok := rr.(*dns.SOA); ok {
			return min(time.Duration(min(soa.Minttl, soa.Hdr.Ttl))*time.Second, cacheMaxNegative)
		}
	}
	return cacheFailure
}

package sandbox

import (
	"crypto/sha256"
	"time"
)

// TokenHash is the SHA-256 of a token's secret. The secret itself is stored
// nowhere. It is 32 random bytes, so that a hash without salt and stretching is
// enough.
type TokenHash [sha256.Size]byte

// Token is what a secret stands for.
type Token struct {
	ID       string // tk-ULID
	Tenant   string
	Name     string
	Admin    bool // may manage tokens and the node
	Created  time.Time
	LastUsed time.Time
}

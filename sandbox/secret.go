package sandbox

// SecretRow is a secret as the store keeps it.
type SecretRow struct {
	Tenant, Name string
	Version      int64  // 1, 2, ...: each change makes a new one
	Record       []byte // JSON of what anybody may know
	Sealed       []byte // the value, encrypted for this tenant, name, version and record
}

// Package structure holds the tests of how the tree is built: which package may
// import which, that every package says what it is, and what must not be in
// the files. There is no code here to import.
package structure

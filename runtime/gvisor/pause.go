package gvisor

import (
	"encoding/binary"
	"runtime"

	"vivarium/sandbox"
)

// PauseProgram makes the root container's program: a static ELF executable of one
// page that waits for ever. The smaller it is, the less a pod costs; a Go
// program here would add 2 MB and a millisecond to each.
//
// Layout: ELF header, one program header, code (elf(5)).
func PauseProgram() ([]byte, error) {
	var code []byte
	var machine uint16
	switch runtime.GOARCH {
	case "amd64":
		machine = 62 // EM_X86_64
		code = []byte{
			0xb8, 34, 0, 0, 0, // mov eax, SYS_pause
			0x0f, 0x05, // syscall
			0xeb, 0xf7, // jmp to the start
		}
	case "arm64":
		machine = 183 // EM_AARCH64
		code = []byte{
			0x00, 0x00, 0x80, 0xd2, // mov x0, #0
			0x01, 0x00, 0x80, 0xd2, // mov x1, #0
			0x02, 0x00, 0x80, 0xd2, // mov x2, #0
			0x03, 0x00, 0x80, 0xd2, // mov x3, #0
			0x04, 0x00, 0x80, 0xd2, // mov x4, #0
			0x28, 0x09, 0x80, 0xd2, // mov x8, #73 (SYS_ppoll: no descriptors, no timeout)
			0x01, 0x00, 0x00, 0xd4, // svc #0
			0xf9, 0xff, 0xff, 0x17, // b to the start
		}
	default:
		return nil, sandbox.Unsupported.Errorf("no pause program for %s", runtime.GOARCH)
	}
	const base, header = 0x400000, 64 + 56
	b := make([]byte, header, header+len(code))
	le := binary.LittleEndian
	copy(b, "\x7fELF\x02\x01\x01") // 64 bit, little endian, version 1
	le.PutUint16(b[16:], 2)        // ET_EXEC
	le.PutUint16(b[18:], machine)
	le.PutUint32(b[20:], 1)
	le.PutUint64(b[24:], base+header) // entry
	le.PutUint64(b[32:], 64)          // program headers
	le.PutUint16(b[52:], 64)
	le.PutUint16(b[54:], 56)
	le.PutUint16(b[56:], 1)
	ph := b[64:]
	le.PutUint32(ph[0:], 1) // PT_LOAD
	le.PutUint32(ph[4:], 5) // readable, executable
	le.PutUint64(ph[16:], base)
	le.PutUint64(ph[24:], base)
	le.PutUint64(ph[32:], uint64(header+len(code)))
	le.PutUint64(ph[40:], uint64(header+len(code)))
	le.PutUint64(ph[48:], 4096)
	return append(b, code...), nil
}

#include "textflag.h"

// A signal handler that does nothing: the link register holds the kernel's way
// back (sigreturn(2)).
TEXT ·doNothing(SB),NOSPLIT|NOFRAME,$0
	RET

// func doNothingPC() uintptr
TEXT ·doNothingPC(SB),NOSPLIT,$0-8
	MOVD	$·doNothing(SB), R0
	MOVD	R0, ret+0(FP)
	RET

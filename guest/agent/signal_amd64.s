#include "textflag.h"

// A signal handler that does nothing: the return address is the kernel's way
// back (sigreturn(2)).
TEXT ·doNothing(SB),NOSPLIT|NOFRAME,$0
	RET

// func doNothingPC() uintptr
TEXT ·doNothingPC(SB),NOSPLIT,$0-8
	LEAQ	·doNothing(SB), AX
	MOVQ	AX, ret+0(FP)
	RET

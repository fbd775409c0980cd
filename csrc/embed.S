// FILE as bytes of the library, under NAME. setup.py says what both are.
.section .rodata
.balign 64
.global NAME
NAME: .incbin FILE
.section .note.GNU-stack, "", %progbits

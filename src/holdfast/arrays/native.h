/* What the files of this folder share. */

#ifndef HOLDFAST_NATIVE_H
#define HOLDFAST_NATIVE_H

enum { LINE = 64, PAGE = 4096 };

/* The widest registers that are used, in bytes: 16, 32 or 64. */
extern int holdfast_registers;

#endif

/* The C functions of libamx_emu.so. Look them up with dlsym(RTLD_DEFAULT, name): they are there when the library
 * was preloaded, and a program that uses them so runs without it too. */
#ifndef AMX_EMU_H
#define AMX_EMU_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* 1 when AMX instructions run in the emulator; 0 when the CPU runs them itself. */
int amx_emu_active(void);

/* Writes how often each instruction completed in this process, at most len counts, and returns how many there are.
 * In this order: ldtilecfg, sttilecfg, tilerelease, tilezero, tileloadd, tileloaddt1, tilestored, tdpbf16ps,
 * tdpfp16ps, tdpbssd, tdpbsud, tdpbusd, tdpbuud. counts may be null if len is 0. */
size_t amx_emu_stats(uint64_t *counts, size_t len);

/* Sets all counts to zero. */
void amx_emu_reset_stats(void);

#ifdef __cplusplus
}
#endif

#endif

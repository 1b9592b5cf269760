// Included before every C++ file of a llama.cpp that is built for a host with AMX: `_tile_loadconfig` with its whole operand.
//
// gcc 12 declares that the intrinsic reads the first eight bytes of the configuration, drops the stores to the others, and ggml's AMX
// kernels die at their first tile load.

#pragma once

#include <immintrin.h>

static inline __attribute__((always_inline)) void hina_tile_loadconfig(const void * config) {
    __asm__ volatile("ldtilecfg %0" : : "m"(*static_cast<const char (*)[64]>(config)));
}

#define _tile_loadconfig hina_tile_loadconfig

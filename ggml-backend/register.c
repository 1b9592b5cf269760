// Links the backend into a program by build flag (ggml-hina.cmake): registers it before main.
//
// A static link would drop this file, as nothing refers to it: the CMake hook adds
// -Wl,--undefined=ggml_hina_linked to whatever links ggml.

#include "ggml-backend.h"
#include "ggml-backend-impl.h"

ggml_backend_reg_t ggml_hina_reg(void);
int                ggml_hina_score(void);

const int ggml_hina_linked = GGML_BACKEND_API_VERSION;

__attribute__((constructor)) static void ggml_hina_register(void) {
    if (ggml_hina_score() > 0) {
        ggml_backend_register(ggml_hina_reg());
    }
}

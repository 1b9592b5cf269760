// The one part in C: what must be compiled against ggml's own macros.
//
// ggml_hina_log hands a finished line to ggml's variadic log function, whose callback the user may have set.

#include "ggml.h"
#include "ggml-impl.h"

void ggml_hina_log(enum ggml_log_level level, const char * line) {
    ggml_log_internal(level, "%s", line);
}

// How many nodes of the graph use node i's result (static inline in ggml-impl.h, so it has no symbol to bind).
int ggml_hina_use_count(const struct ggml_cgraph * graph, int i) {
    return ggml_node_get_use_count(graph, i);
}

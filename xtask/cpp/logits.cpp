// Writes the logits of a model for a fixed, made-up text to a file of raw F32, row by row.
//
//   hina-logits MODEL OUT [--batch N] [--decode N] [--threads N] [--rpc HOST:PORT] [--plugin-first FILE]
//               [--flash-attn on|off] [--eval-callback]
//
// First one batch of N tokens, then N single tokens; every token gives one row. --eval-callback watches every node of
// the graph, which makes the scheduler hand the nodes to the backend one by one. Uses only the public API of llama.cpp.

#include "ggml-backend.h"
#include "llama.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

struct options {
    const char * model = nullptr;
    const char * out = nullptr;
    int batch = 77;
    int decode = 6;
    int threads = 2;
    std::string rpc;
    const char * plugin_first = nullptr;
    llama_flash_attn_type flash_attn = LLAMA_FLASH_ATTN_TYPE_AUTO;
    bool eval_callback = false;
};

[[noreturn]] static void fail(const char * what) {
    fprintf(stderr, "hina-logits: %s\n", what);
    exit(1);
}

static options parse(int argc, char ** argv) {
    options o;
    for (int i = 1; i < argc; i++) {
        const std::string arg = argv[i];
        const auto value = [&]() -> const char * { return i + 1 < argc ? argv[++i] : (fail("an option lacks its value"), nullptr); };
        if (arg == "--batch") o.batch = atoi(value());
        else if (arg == "--decode") o.decode = atoi(value());
        else if (arg == "--threads") o.threads = atoi(value());
        else if (arg == "--rpc") o.rpc = value();
        else if (arg == "--plugin-first") o.plugin_first = value();
        else if (arg == "--flash-attn") o.flash_attn = std::string(value()) == "on" ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
        else if (arg == "--eval-callback") o.eval_callback = true;
        else if (!o.model) o.model = argv[i];
        else if (!o.out) o.out = argv[i];
        else fail(("unknown argument " + arg).c_str());
    }
    if (!o.out || o.batch < 1 || o.decode < 0) fail("usage: hina-logits MODEL OUT [options]");
    return o;
}

static void add_rpc_server(const std::string & endpoint) {
    ggml_backend_reg_t rpc = ggml_backend_reg_by_name("RPC");
    if (!rpc) fail("this llama.cpp has no RPC backend");
    const auto add = reinterpret_cast<ggml_backend_reg_t (*)(const char *)>(
        ggml_backend_reg_get_proc_address(rpc, "ggml_backend_rpc_add_server"));
    ggml_backend_reg_t server = add ? add(endpoint.c_str()) : nullptr;
    if (!server) fail("cannot reach the RPC server");
    ggml_backend_register(server);
}

static bool watch(ggml_tensor *, bool ask, void * seen) {
    *static_cast<long *>(seen) += !ask;
    return true;
}

// Decodes `n` tokens from `pos` on as one batch and appends their logits.
static void decode(llama_context * ctx, int n_vocab, int pos, int n, std::vector<float> & rows) {
    llama_batch batch = llama_batch_init(n, 0, 1);
    batch.n_tokens = n;
    for (int i = 0; i < n; i++) {
        batch.token[i] = llama_token((unsigned(pos + i) * 2654435761u >> 8) % unsigned(n_vocab));
        batch.pos[i] = pos + i;
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = 0;
        batch.logits[i] = true;
    }
    if (llama_decode(ctx, batch) != 0) fail("llama_decode failed");
    for (int i = 0; i < n; i++) {
        const float * row = llama_get_logits_ith(ctx, i);
        rows.insert(rows.end(), row, row + n_vocab);
    }
    llama_batch_free(batch);
}

int main(int argc, char ** argv) {
    const options o = parse(argc, argv);
    llama_backend_init();
    if (o.plugin_first && !ggml_backend_load(o.plugin_first)) fail("the plugin does not load");
    ggml_backend_load_all();
    if (!o.rpc.empty()) add_rpc_server(o.rpc);

    llama_model_params mp = llama_model_default_params();
    mp.n_gpu_layers = 999;
    llama_model * model = llama_model_load_from_file(o.model, mp);
    if (!model) fail("the model does not load");
    const int n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));

    long seen = 0;
    llama_context_params cp = llama_context_default_params();
    cp.n_ctx = cp.n_batch = cp.n_ubatch = o.batch + o.decode;
    cp.n_threads = cp.n_threads_batch = o.threads;
    cp.flash_attn_type = o.flash_attn;
    if (o.eval_callback) {
        cp.cb_eval = watch;
        cp.cb_eval_user_data = &seen;
    }
    llama_context * ctx = llama_init_from_model(model, cp);
    if (!ctx) fail("no context");

    std::vector<float> rows;
    decode(ctx, n_vocab, 0, o.batch, rows);
    for (int i = 0; i < o.decode; i++) decode(ctx, n_vocab, o.batch + i, 1, rows);
    if (o.eval_callback && seen == 0) fail("the eval callback saw no node");

    FILE * file = fopen(o.out, "wb");
    if (!file || fwrite(rows.data(), sizeof(float), rows.size(), file) != rows.size() || fclose(file) != 0) {
        fail("cannot write the logits");
    }
    llama_free(ctx);
    llama_model_free(model);
    llama_backend_free();
    return 0;
}

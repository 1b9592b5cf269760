//! Products that follow their weights' pages, on a made-up machine with two nodes. A test program of its own, because the
//! environment is read once.

mod ggml;

use ggml::*;
use ggml_hina::ggml::sys::*;

#[test]
fn pages_on_two_nodes_give_the_same_numbers_and_are_counted() {
    let stats = std::env::temp_dir().join(format!("hina-numa-{}.json", std::process::id()));
    // SAFETY: this program has one test, so no other thread reads the environment now.
    unsafe {
        std::env::set_var("GGML_HINA_NUMA_SIM", "2:4096");
        std::env::set_var("GGML_HINA_STATS", &stats);
    }
    if !ready() {
        return;
    }
    for kind in [GGML_TYPE_BF16, GGML_TYPE_Q8_0] {
        for tokens in [1, 4, 5, 32, 33] {
            let net = mul_mat_id(kind, tokens);
            assert_eq!(Backend::cpu(2).compute(&net), GGML_STATUS_SUCCESS);
            let want = values(net.named("y"));
            let _ = std::fs::remove_file(&stats);
            assert_eq!(Backend::hina(4).compute(&net), GGML_STATUS_SUCCESS);
            check_mul_mat_id(&net, &values(net.named("y")), &want, &format!("type {kind}, {tokens} tokens"));
            let did = std::fs::read_to_string(&stats).unwrap();
            let [local, remote, segments] = bytes_of_weights(&did);
            assert!(local + remote > 0, "{did}");
            // 32 tokens are 16 for each expert: with more it is computing that takes the time, and with short rows of Q8_0 with more than
            // 2 for each expert. Then threads take plain blocks as they come, and chance says how much of that is local.
            let most = if kind == GGML_TYPE_Q8_0 { 4 } else { 32 };
            assert_eq!(segments, if tokens <= most { local + remote } else { 0 }, "{tokens} tokens: {did}");
            // These matrices of a few pages cannot all be cut by node.
            assert!(tokens > most || local > 3 * remote, "{tokens} tokens: {did}");
        }
    }
    let _ = std::fs::remove_file(&stats);
}

/// The bytes of weights that lay on the worker's node, those that did not, and how many of both were multiplied by segments.
fn bytes_of_weights(stats: &str) -> [u64; 3] {
    ["local", "remote", "segment"].map(|of| {
        let (_, rest) = stats.split_once(&format!("\"{of}_bytes\":")).unwrap_or_else(|| panic!("no {of} in {stats}"));
        rest.chars().take_while(char::is_ascii_digit).collect::<String>().parse().unwrap()
    })
}

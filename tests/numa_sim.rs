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
            // These matrices of a few pages cannot all be cut by node. With many tokens (32 are 16 for each expert) it is computing
            // that takes the time: the normal path runs, by halves on each node.
            let share = share_of_local(&did);
            // Short rows of Q8_0 go the normal path from 3 for each expert on (5 and 32 here), when its threads take blocks as they come.
            let most = if kind == GGML_TYPE_Q8_0 { 4 } else { 32 };
            assert!(tokens > most || share > 0.75, "{tokens} tokens: {did}");
            assert!(tokens <= 32 || (0.3..0.7).contains(&share), "{tokens} tokens: {did}");
        }
    }
    let _ = std::fs::remove_file(&stats);
}

/// The share of the weights' bytes that lay on the worker's node.
fn share_of_local(stats: &str) -> f64 {
    let number = |name: &str| {
        let (_, rest) = stats.split_once(name).unwrap_or_else(|| panic!("no {name} in {stats}"));
        rest.chars().take_while(char::is_ascii_digit).collect::<String>().parse::<f64>().unwrap()
    };
    let (local, remote) = (number("\"local_bytes\":"), number("\"remote_bytes\":"));
    local / (local + remote)
}

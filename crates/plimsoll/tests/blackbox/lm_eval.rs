//! EleutherAI's `lm-eval` drives the server, as in a comparison of models.

use crate::product::Server;
use crate::python;

/// The release that the script was written for.
const LM_EVAL: &str = "lm-eval[api]==0.4.13";

#[test]
#[ignore = "external"]
fn lm_eval_runs_its_tasks() {
    let server = Server::start(&["--max-total-token-num", "8192", "--max-req-total-len", "1024"]);
    python::satisfies(LM_EVAL, "lm_eval_client.py", &server, &[]);
}

"""What a server says that it has generated."""

from rollout.engines.token_counts import Generated

OF_VLLM = """\
# HELP vllm:generation_tokens_total Number of generation tokens processed.
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="/m"} 1.5e+03
vllm:generation_tokens_total{engine="1",model_name="/m"} 500.0
vllm:generation_tokens_created{engine="0",model_name="/m"} 1.7e+09
vllm:request_success_total{engine="0",finished_reason="stop",model_name="/m"} 3.0
vllm:request_success_total{engine="0",finished_reason="length",model_name="/m"} 4.0
"""


def test_figures_of_all_engines_and_of_all_ends_are_added_up() -> None:
    assert Generated.read(OF_VLLM) == Generated(2000, 7)
    assert Generated.read(Generated(12, 3).text()) == Generated(12, 3)
    assert Generated.read("vllm:num_requests_running 3\n") == Generated(0, 0), "it keeps no statistics"


def test_server_that_has_started_again_begins_with_nothing() -> None:
    assert Generated(120, 4).since(Generated(100, 1)) == Generated(20, 3)
    assert Generated(20, 1).since(Generated(100, 9)) == Generated(20, 1)

from coordinator.protocol.back_off import BackOff


def test_each_loss_keeps_a_rank_out_for_twice_as_long_up_to_a_limit() -> None:
    back_off = BackOff()
    assert [back_off.lose(2, 0.0, 30.0, 100.0) for _ in range(5)] == [0.0, 30.0, 60.0, 100.0, 100.0]
    assert back_off.losses(2) == 5 and back_off.losses(1) == 0


def test_rank_is_out_until_its_time_has_come() -> None:
    back_off = BackOff()
    back_off.lose(2, 0.0, 30.0, 100.0)
    assert not back_off.is_out(2, 0.0), "the first return is free"
    back_off.lose(2, 10.0, 30.0, 100.0)
    assert back_off.is_out(2, 39.0) and not back_off.is_out(2, 40.0) and not back_off.is_out(1, 39.0)


def test_finished_iteration_settles_the_account() -> None:
    back_off = BackOff()
    for _ in range(4):
        back_off.lose(2, 0.0, 30.0, 100.0)
    back_off.settle([0, 1, 2])
    assert not back_off.is_out(2, 0.0) and back_off.lose(2, 0.0, 30.0, 100.0) == 0.0


def test_losses_without_end_overflow_nothing() -> None:
    back_off = BackOff()
    assert [back_off.lose(2, 0.0, 30.0, 100.0) for _ in range(5000)][-1] == 100.0

"""The mistakes that `tools/mutations.py` puts into the package, and the test that finds each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """A plausible mistake.

    ``old``: a text that occurs once in the file ``path`` of `src/zeroshard`, or of the repository if it
    is in `testing/`; ``new`` replaces it.
    ``witness``: arguments of pytest for tests that `make test` runs, one of which fails with the mistake.
    """

    name: str
    path: str
    old: str
    new: str
    witness: str

    @property
    def file(self) -> str:
        """The path inside the repository."""
        return self.path if self.path.startswith("testing/") else f"src/zeroshard/{self.path}"


MUTATIONS = [
    # ------------------------------------------------------------------ core
    Mutation(
        "layout-padding-for-two-shards",  # other numbers of ranks only
        "core/layout.py",
        "return UnitLayout(tuple(slots), round_up(end, ALIGNMENT * num_shards), num_shards)",
        "return UnitLayout(tuple(slots), round_up(end, ALIGNMENT * 2), num_shards)",
        "tests/parity/test_several_ranks.py::test_three_ranks_equal_one_process",
    ),
    Mutation(
        "planned-gradients-of-stage-2",  # stage 2 only
        "core/stages.py",
        "            shard if stage.shards_grads else full",
        "            shard if stage.shards_params else full",
        "tests/accounting/test_live_bytes.py::test_two_ranks_hold_what_the_paper_says",
    ),
    # ------------------------------------------------------------------ what a user sees first
    Mutation(
        "mistakes-with-our-frames",
        "watchdog/uncaught.py",
        "    if isinstance(error, ZeroShardError) and not isinstance(error, UnitStateError):",
        "    if isinstance(error, DistributedError):",
        "tests/unit/test_program_frames.py"
        "::test_a_mistake_in_initialize_is_told_without_frames_of_the_library",
    ),
    Mutation(
        "misspelt-names-without-the-nearest",
        "engine/engine_base.py",
        "near = get_close_matches(name, public, n=1, cutoff=0.7)",
        "near = get_close_matches(name, public, n=1, cutoff=0.99)",
        "tests/ranks/test_engine_api.py"
        "::test_a_misspelt_name_of_an_engine_is_an_error_with_the_nearest_one",
    ),
    Mutation(
        "a-failed-run-without-its-cause",
        "report/page.py",
        'failure=_failure(folder) if any(record.reason != "" for record in records) else ""',
        'failure=""',
        "tests/unit/test_report.py::test_a_failed_run_says_which_rank_was_the_cause_and_where",
    ),
    Mutation(
        "planned-bytes-of-traffic-are-elements",
        "planner/simulate.py",
        "entry.payload_numel, entry.sent_numel, entry.sent_nbytes,",
        "entry.payload_numel, entry.sent_numel, entry.sent_numel,",
        "tests/unit/test_plan_cli.py::test_no_number_is_cut_in_a_file_nor_on_a_narrow_terminal",
    ),
    # ------------------------------------------------------------------ metrics, session
    Mutation(
        "a-resumed-run-loses-earlier-values",  # of CSV files
        "metrics/sinks.py",
        'with path.open("a", newline="")',
        'with path.open("w", newline="")',
        "tests/unit/test_monitors.py::test_csv_of_a_resumed_run_is_appended",
    ),
    Mutation(
        "a-joined-run-is-closed",  # the program's run of a tracker
        "metrics/sinks.py",
        "        if self._owned:\n            self._run.finish()",
        "        self._run.finish()",
        "tests/unit/test_monitors.py::test_wandb_joins_a_run_that_is_open_and_leaves_it_open",
    ),
    Mutation(
        "purposes-share-a-process-group",  # so gathers wait for reductions, on a mesh of GPUs
        "session/comm_session.py",
        "count = 1 if connected is None else len(purposes)",
        "count = 1",
        "tests/ranks/test_device_comm.py::"
        "test_on_a_mesh_each_purpose_has_a_process_group_of_its_own_on_a_device",
    ),
    # ------------------------------------------------------------------ zero
    Mutation(
        "reader-of-gradients-forgets-predivision",  # accumulation at stages 0 and 1 only
        "zero/reduce.py",
        "        real_view(grads_N).div_(self.predivide)\n        grads_N = grads_N.to(row.reduce)\n",
        "        grads_N = grads_N.to(row.reduce)\n",
        "tests/ranks/test_access.py::test_full_gradient_during_accumulation_is_the_sum_so_far",
    ),
    Mutation(
        "slots-without-gradient-keep-old-bytes",
        "zero/gradients.py",
        "        if not all(self.filled):\n            missing",
        "        if not any(self.filled):\n            missing",
        "tests/parity/test_several_ranks.py::test_two_ranks_equal_one_process -k experts",
    ),
    Mutation(
        "second-gradient-replaces-the-first",  # accumulation in 16 bit only
        "zero/gradients.py",
        "accumulate(self.views[index], grad)",
        "self.views[index].copy_(grad)",
        "tests/ranks/test_waiting_gradients.py::test_waiting_gradients_train_as_the_plain_loop",
    ),
    Mutation(
        "rescaled-gradient-rounded-twice",  # fp16 with two engines only
        "zero/gradients.py",
        "return (grad.to(wide) * factor).to(grad.dtype)",
        "return grad * factor.to(grad.dtype)",
        "tests/ranks/test_shared_loss.py::test_a_quotient_of_scales_may_be_out_of_the_range_of_fp16",
    ),
    Mutation(
        "clip-also-scales-up",
        "zero/clip.py",
        "return torch.clamp(max_norm / (norm + 1e-6), max=1.0)",
        "return max_norm / (norm + 1e-6)",
        "tests/parity/test_one_rank.py -k lora",
    ),
    Mutation(
        "gradient-flags-of-the-last-rank-only",  # ranks that use other parameters only
        "zero/clip.py",
        "word |= int(value)",
        "word = int(value)",
        "tests/parity/test_several_ranks.py::test_two_ranks_equal_one_process -k experts",
    ),
    Mutation(
        "norm-of-stage-0-counts-every-rank",  # stage 0 only
        "zero/make_shard.py",
        "param_R, begin, end, own = unit.full_N, 0, layout.full_numel, (low, high)",
        "param_R, begin, end, own = unit.full_N, 0, layout.full_numel, (0, layout.full_numel)",
        "tests/parity/test_several_ranks.py::test_two_ranks_equal_one_process -k bare_parameters",
    ),
    Mutation(
        "embedding-gathered-for-backward",
        "zero/prefetch.py",
        "if later.is_sharded and (forward or later.is_read_in_backward):",
        "if later.is_sharded:",
        "tests/accounting/test_traffic.py::test_an_embedding_is_not_gathered_for_backward",
    ),
    Mutation(
        "prefetch-without-room",
        "zero/prefetch.py",
        "prefetch_numel if live_numel else 0",
        "prefetch_numel",
        "tests/ranks/test_prefetch.py::test_without_room_nothing_is_prefetched",
    ),
    Mutation(
        "failed-launch-is-forgotten",  # then others of the block read values that never came
        "comm/process_group.py",
        "            self._error = error\n            raise\n",
        "            raise\n",
        "tests/streams/test_whole_blocks.py::test_everyone_who_waits_for_a_launch_that_failed_hears_of_it",
    ),
    Mutation(
        "block-loses-edits",
        "zero/prefetch.py",
        "        torch._foreach_copy_(shards, parts)\n",
        "",
        "tests/streams/test_whole_blocks.py::test_what_a_forward_writes_into_a_block_stays",
    ),
    Mutation(
        "block-is-half-gathered",  # after an error the units that had memory keep it
        "zero/unit.py",
        "            unit.cancel_gather()\n",
        "            pass\n",
        "tests/streams/test_whole_blocks.py::test_without_memory_for_all_of_a_block_none_of_it_is_gathered",
    ),
    Mutation(
        "transposed-data-is-in-its-place",  # square matrices only
        "zero/full_params.py",
        "            and [*map(_strides_of, self.params)] == self._strides\n",
        "",
        "tests/unit/test_full_params.py::test_parameters_with_other_memory_are_found",
    ),
    Mutation(
        "result-of-a-reduction-stays-scratch",  # in a launch of several units only
        "zero/grad_ledger.py",
        "    ledger.hold_all(CATEGORIES[SCRATCH], freed)\n",
        "",
        "tests/streams/test_whole_blocks.py::test_what_a_launch_holds_is_known_without_a_look",
    ),
    Mutation(
        "gathered-memory-is-not-registered",  # which only costs time
        "zero/unit.py",
        "            self._memory.resize(self.full_N, self.full_nbytes)\n",
        "            resize(self.full_N, self.full_nbytes)\n",
        "tests/streams/test_registered_memory.py::"
        "test_all_that_is_gathered_is_in_registered_memory_and_no_bit_changes",
    ),
    Mutation(
        "registration-is-ended-after-an-abort",
        "comm/process_group.py",
        "        self.memory.forget()\n",
        "",
        "tests/streams/test_registered_memory.py::test_after_an_abort_no_registration_is_ended",
    ),
    Mutation(
        "some-ranks-register-alone",
        "comm/process_group.py",
        "    if not all(possible):",
        "    if not any(possible):",
        "tests/streams/test_registered_memory.py::"
        "test_where_it_is_not_possible_memory_is_plain_and_the_line_says_why",
    ),
    Mutation(
        "resident-units-cannot-be-offloaded",  # stages 0 to 2 only
        "zero/unit.py",
        "        (UnitState.FULL, UnitState.OFFLOADED),\n",
        "",
        "tests/ranks/test_offload_states.py::test_a_move_changes_no_bit_on_two_ranks",
    ),
    Mutation(
        "asynchronous-update-cannot-end-sharded",  # stage 3 with offload to the host only
        "zero/unit.py",
        "        (UnitState.UPDATING, UnitState.SHARDED),\n",
        "",
        "tests/parity/test_offload.py::test_the_update_on_the_worker_gives_the_same_bits",
    ),
    Mutation(
        "assigned-data-lost-at-reshard",  # stage 3 only
        "zero/unit.py",
        "edited = self.rebind_storage() or versions != self._full_versions",
        "edited = versions != self._full_versions",
        "tests/ranks/test_edits.py::test_edits_inside_forward_are_kept",
    ),
    Mutation(
        "update-keeps-the-versions",
        "zero/unit.py",
        "        self.increment_versions()\n        if updating is None:\n            self.store.write()",
        "        if updating is None:\n            self.store.write()",
        "tests/ranks/test_refused_graphs.py::test_a_graph_from_before_the_update_is_refused_as_in_pytorch",
    ),
    Mutation(
        "local-gradient-written-at-the-start",  # a parameter that is cut between ranks only
        "zero/access.py",
        "start = unit.layout.slots[index].start + at",
        "start = unit.layout.slots[index].start",
        "tests/ranks/test_access.py::test_local_pieces_are_set_in_place",
    ),
    Mutation(
        "edits-of-rank-0-only-are-seen",
        "zero/gathered.py",
        "any_rank = unpack_any(votes[:, 1:], len(flags))",
        "any_rank = unpack_any(votes[:1, 1:], len(flags))",
        "tests/ranks/test_edits.py::test_edit_without_modifier_raises_on_every_rank_and_ranks_stay_equal",
    ),
    Mutation(
        "unused-parameters-are-updated",
        "zero/optimizer.py",
        "inputs = StepInputs(factor, found_inf, untouched or {}, pages)",
        "inputs = StepInputs(factor, found_inf, {}, pages)",
        "tests/parity/test_one_rank.py -k unused",
    ),
    Mutation(
        "fused-pass-updates-unused-parameters",
        "zero/updaters.py",
        "fused = self.prepared() if not skipped and inputs.found_inf is None else None",
        "fused = self.prepared() if inputs.found_inf is None else None",
        "tests/ranks/test_model_changes.py::test_frozen_after_the_engine_was_built_and_unfrozen_again",
    ),
    Mutation(
        "joint-pass-updates-unused-parameters",
        "zero/updaters.py",
        "if inputs.untouched or inputs.found_inf is not None:",
        "if inputs.found_inf is not None:",
        "tests/ranks/test_model_changes.py::test_frozen_after_the_engine_was_built_and_unfrozen_again",
    ),
    Mutation(
        "joint-pass-takes-the-gradient-of-another-chunk",
        "optim/fused_update.py",
        "span._replace(chunk=chunk)",
        "span._replace(chunk=0)",
        "tests/parity/test_several_ranks.py",
    ),
    Mutation(
        "stage-1-reduces-every-micro-batch",  # stage 1 only
        "engine/build_runtime.py",
        'eager = stage.shards_grads and frame.traffic.reduce == "micro_batch"',
        'eager = stage.shards_optimizer and frame.traffic.reduce == "micro_batch"',
        "tests/accounting/test_traffic.py::test_accumulation_is_free_below_stage_2_and_reduces_every_micro_batch_above",
    ),
    Mutation(
        "copies-of-gradients-added-again",  # shared key/value heads, several backwards only
        "zero/copy_sums.py",
        "                torch._foreach_zero_(parts)\n",
        "                pass\n",
        "tests/ranks/test_copy_sums.py::test_gradients_can_be_read_and_set_and_more_may_come",
    ),
    Mutation(
        "mesh-norm-counts-copies",
        "zero/mesh_norm.py",
        "return in_replica and position not in self._uncounted",
        "return in_replica",
        "tests/ranks/test_tensor_parallel.py::test_four_steps_are_those_of_one_plain_process",
    ),
    Mutation(
        "tied-weight-of-a-replica-not-counted",  # tied stages with replicas only
        "zero/mesh_norm.py",
        "in_replica = self._counts or position in self._others.positions",
        "in_replica = self._counts",
        "tests/ranks/test_tied_stages.py::test_replicas_count_and_save_a_tied_weight_once",
    ),
    Mutation(
        "division-of-a-gradient-multiplies",
        "zero/held_grads.py",
        '    torch._foreach_div_: "div_",',
        '    torch._foreach_div_: "mul_",',
        "tests/ranks/test_grads_of_programs.py::test_two_ranks_train_as_the_plain_program",
    ),
    Mutation(
        "module-freed-although-a-graph-is-recorded",  # create_graph at stage 3 only
        "zero/hooks.py",
        "if through and wrapped is not self.prefetcher.root and not self.creates_graph:",
        "if through and wrapped is not self.prefetcher.root:",
        "tests/ranks/test_access.py::test_gradient_penalty",
    ),
    # ------------------------------------------------------------------ comm
    Mutation(
        "shm-copied-slice-of-rank-0",  # three ranks, buffers that are not lent only
        "comm/shm.py",
        "at = rank if nbytes == full_N.nbytes else rank - (rank > peer)",
        "at = rank if nbytes == full_N.nbytes else 0",
        "tests/ranks/test_collectives.py::test_reduce_scatter_sums_in_rank_order",
    ),
    Mutation(
        "shm-slot-reused-before-it-is-read",
        "comm/shm_ring.py",
        "            self.await_read(item, old)\n        return seq",
        "        return seq",
        "tests/ranks/test_shm.py::test_more_in_flight_than_the_ring_has_slots",
    ),
    Mutation(
        "shm-block-reused-before-it-is-read",
        "comm/shm_ring.py",
        "        block.reads.append(seq)\n        self.control.publish(seq, item[2], (block.offset, "
        "block.nbytes, 0), nbytes)",
        "        self.control.publish(seq, item[2], (block.offset, block.nbytes, 0), nbytes)",
        "tests/ranks/test_shm.py::test_sources_may_be_overwritten_at_once_after_the_wait",
    ),
    Mutation(
        "shm-lent-buffer-written-before-it-is-read",
        "comm/shm.py",
        "    ring.await_readers(item, slices[0])\n",
        "",
        "tests/ranks/test_shm.py::test_a_gather_into_a_lent_buffer_waits_for_the_readers_of_a_reduction",
    ),
    Mutation(
        "p2p-own-part-comes-last",  # p2p only
        "comm/p2p.py",
        "parts.insert(self.rank, slices[self.rank])",
        "parts.append(slices[self.rank])",
        "tests/parity/test_several_ranks.py::test_the_transport_changes_no_bit",
    ),
    Mutation(
        "p2p-tag-without-the-history",  # p2p, ranks that disagree only
        "comm/p2p.py",
        "self._tag = item[2] & TAG_BITS",
        "self._tag = item[0] & TAG_BITS",
        "tests/faults/test_comm_faults.py::test_no_wrong_number_is_returned_after_a_swap",
    ),
    Mutation(
        "sum-of-three-ranks-in-16-bit",  # three ranks and 16 bit only
        "comm/collectives.py",
        "dtype = torch.float32 if out_S.dtype in _SHORT else out_S.dtype",
        "dtype = out_S.dtype",
        "tests/ranks/test_collectives.py::test_a_wide_sum_is_rounded_once",
    ),
    Mutation(
        "replicas-forget-a-padded-sum",  # three replicas only
        "comm/hops.py",
        "            sum_S.copy_(space[:numel])\n",
        "",
        "tests/ranks/test_two_hop.py::test_three_replicas_have_equal_bits",
    ),
    Mutation(
        "rows-of-replicas-in-the-order-of-columns",
        "comm/hops.py",
        "return rows_IOK.transpose(0, 1).flatten(0, 1)",
        "return rows_IOK.flatten(0, 1)",
        "tests/ranks/test_two_hop.py::test_small_vectors_of_all_replicas_come_in_the_order_of_the_ranks",
    ),
    Mutation(
        "rows-of-nodes-in-the-order-of-shards",  # edits of one rank only
        "comm/hops.py",
        "return rows_IOK.transpose(0, 1).flatten(0, 1)",
        "return rows_IOK.flatten(0, 1)",
        "tests/ranks/test_nested.py::test_small_vectors_and_broadcasts_are_numbered_by_rank",
    ),
    Mutation(
        "second-shards-of-the-step-before",
        "offload/zeropp_stores.py",
        'too."""\n        self._is_whole = False',
        'too."""',
        "tests/parity/test_nodes.py::test_a_step_sends_on_each_link_what_the_two_hops_must",
    ),
    Mutation(
        "padding-of-gradients-in-blocks",
        "comm/quantized.py",
        "            full_N[begin:end].zero_()\n",
        "            pass\n",
        "tests/ranks/test_quantized.py::test_padding_is_not_rounded_with_gradients",
    ),
    Mutation(
        "edits-rounded-with-their-blocks",
        "offload/zeropp_stores.py",
        "torch.where(differs, part_S, self.shard_S)",
        "part_S",
        "tests/ranks/test_quantized.py::test_an_edit_reaches_all_ranks_and_leaves_other_elements_exact",
    ),
    Mutation(
        "gathers-before-earlier-second-hops",  # ranks that wait in different orders
        "comm/hops.py",
        "        self.free_hop(self.outer)\n        first = self.outer.all_gather(",
        "        first = self.outer.all_gather(",
        "tests/ranks/test_nested.py::test_collectives_of_one_hop_start_in_the_order_of_the_calls",
    ),
    Mutation(
        "edits-of-gradients-miss-the-sum-of-the-node",  # between micro-batches only
        "zero/gradients.py",
        "for flat in (self.node_sum_P, reduced_S)",
        "for flat in (reduced_S,)",
        "tests/ranks/test_boundary_sums.py::test_programs_see_and_change_the_same_gradients",
    ),
    Mutation(
        "sums-of-nodes-in-the-dtype-of-the-accumulation",  # twice the bytes over the slow link
        "zero/node_sums.py",
        "sum_P.to(buffer.unit.row.reduce), None",
        "sum_P, None",
        "tests/ranks/test_boundary_sums.py::test_sums_pass_in_the_dtype_of_reductions",
    ),
    Mutation(
        "reduction-of-replicas-not-waited-for",  # streams of a device only
        "comm/hops.py",
        "            queue.ops.current_stream().wait_event(self._event)\n",
        "",
        "tests/streams/test_two_hop_streams.py::test_the_hops_are_ordered_and_the_host_does_not_wait",
    ),
    Mutation(
        "flag-of-an-aborted-step",  # after a lost rank on a device only
        "device/ops.py",
        "        self._check()\n        return bool(self._flag)",
        "        return bool(self._flag)",
        "tests/streams/test_lost_ranks.py::test_a_number_of_an_aborted_step_is_the_diagnosis",
    ),
    Mutation(
        "update-with-an-aborted-gradient",  # after a lost rank on a device only
        "device/copy_streams.py",
        "check = self._ops.raise_if_aborted",
        "check = _nothing",
        "tests/streams/test_lost_ranks.py::test_the_host_does_not_update_with_an_aborted_gradient",
    ),
    Mutation(
        "texts-measured-in-characters",
        "comm/store_keys.py",
        "{len(text.encode())}",
        "{len(text)}",
        "tests/unit/test_agreement_of_many.py::test_any_text_can_be_posted",
    ),
    Mutation(
        "history-of-the-first-rank-is-right",
        "comm/recorder.py",
        "common = max(values, key=values.count)",
        "common = values[0]",
        "tests/unit/test_flight_recorder.py -k odd",
    ),
    # ------------------------------------------------------------------ optim
    Mutation(
        "l2-penalty-with-the-wrong-sign",
        "optim/optimizers.py",
        "g = g.add(w, alpha=decay)",
        "g = g.add(w, alpha=-decay)",
        "tests/unit/test_optimizers.py::test_flexible_adam_with_ordinary_options_is_adam",
    ),
    Mutation(
        "bias-corrections-swapped",
        "optim/optimizers.py",
        "scale1, scale2 = _bias_correction(beta1, step), _bias_correction(beta2, step).sqrt()",
        "scale1, scale2 = _bias_correction(beta2, step), _bias_correction(beta1, step).sqrt()",
        "tests/unit/test_optimizers.py::test_flexible_adam_with_ordinary_options_is_adam",
    ),
    Mutation(
        "trust-ratio-upside-down",
        "optim/optimizers.py",
        "bounded = (w_norm / update_norm)",
        "bounded = (update_norm / w_norm)",
        "tests/unit/test_optimizers.py::test_lamb_gives_the_numbers_of_its_formula",
    ),
    Mutation(
        "bf16-ties-rounded-up",
        "optim/host_update.cpp",
        "const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;",
        "const uint32_t rounded = (bits + 0x8000u) >> 16;",
        "tests/unit/test_onepass.py::test_the_compiled_update_gives_the_same_bits",
    ),
    Mutation(
        "elements-after-the-last-64-left-out",
        "optim/fused_update.py",
        "if (begin := at + _round_down(value.numel())) < at + value.numel()",
        "if (begin := at + _round_down(value.numel())) > at + value.numel()",
        "tests/unit/test_onepass.py::test_the_compiled_update_gives_the_same_bits",
    ),
    Mutation(
        "compiled-update-of-memory-that-moved",  # parameters on disk only
        "optim/fused_update.py",
        "        if bases_at == self._bases_at:\n",
        "        if self._bases_at is not None:\n",
        "tests/parity/test_offload.py::test_the_compiled_update_gives_the_same_bits_in_every_store",
    ),
    Mutation(
        "norms-added-in-the-order-of-units",
        "optim/fragment_norms.py",
        "found = sorted(norms, key=itemgetter(0))",
        "found = list(norms)",
        "tests/parity/test_one_rank.py -k image_tower",
    ),
    Mutation(
        "one-cycle-a-step-late",
        "optim/schedulers.py",
        "height = self._height(i + 1)",
        "height = self._height(i)",
        "tests/unit/test_schedulers.py::test_one_cycle_goes_up_and_down",
    ),
    Mutation(
        "cosine-a-step-late",
        "optim/schedulers.py",
        "(i - warmup.steps + 1)",
        "(i - warmup.steps)",
        "tests/unit/test_schedulers.py::test_cosine_starts_at_zero_then_at_its_minimum_and_ends_at_its_floor",
    ),
    Mutation(
        "rate-of-a-skipped-step-stays",  # an overflow that the host learns late only
        "optim/schedulers.py",
        "        group.update(saved)\n",
        "        group.setdefault('lr', saved['lr'])\n",
        "tests/ranks/test_precision.py::test_a_skip_that_the_host_learns_late_changes_nothing",
    ),
    Mutation(
        "skipped-step-is-counted",  # kernels of a device only
        "optim/triton_kernels.py",
        "value + tl.where(flag == 0.0, 1.0, 0.0)",
        "value + 1.0",
        "tests/unit/test_triton_update.py::test_the_flag_on_the_device_stops_everything",
    ),
    # ------------------------------------------------------------------ precision
    Mutation(
        "hysteresis-forgives-one-more",
        "precision/loss_scaler.py",
        "lower = overflow & (self._budget <= 1)",
        "lower = overflow & (self._budget < 1)",
        "tests/unit/test_loss_scaler.py::test_the_dynamic_scale_follows_the_rule_step_by_step",
    ),
    Mutation(
        "moments-in-the-dtype-of-the-master",  # bf16 masters with fp32 moments only
        "precision/policy.py",
        "moments=self.moments or dtype",
        "moments=self.master or dtype",
        "tests/ranks/test_precision.py::test_bf16_master_with_fp32_moments",
    ),
    Mutation(
        "fp16-autocast-without-loss-scale",
        "precision/loss_scaler.py",
        'if not fp16.enabled and not (autocast.enabled and autocast.dtype == "float16"):',
        "if not fp16.enabled:",
        "tests/unit/test_loss_scaler.py::test_the_configuration_chooses_the_scale",
    ),
    Mutation(
        "reported-loss-scale-is-the-next-one",  # fp16 only
        "engine/optimizer_step.py",
        "scale = self._scaler.scale.clone()\n        clip",
        "scale = self._scaler.scale\n        clip",
        "tests/ranks/test_precision.py::test_the_loss_scale_follows_the_rule_when_one_rank_overflows",
    ),
    # ------------------------------------------------------------------ offload
    Mutation(
        "swap-file-pieces-in-one-place",  # unaligned memory larger than a buffer only
        "offload/swap_file.py",
        "self._call(between, offset + at, round_to_page(part), writes=writes)",
        "self._call(between, offset + straight, round_to_page(part), writes=writes)",
        "tests/unit/test_swap_file.py::test_a_block_larger_than_the_memory_between_moves_in_pieces",
    ),
    Mutation(
        "page-read-into-a-slot-that-is-written",
        "offload/pager.py",
        "nbytes=nbytes, after=slot.write)",
        "nbytes=nbytes)",
        "tests/unit/test_pager.py::test_a_slot_is_read_into_only_after_its_last_page_was_written",
    ),
    Mutation(
        "stored-gradient-changed-while-it-is-written",
        "offload/grad_store.py",
        "        self.prefetch()\n        self.finish()\n",
        "        self.prefetch()\n",
        "tests/unit/test_grad_store.py::test_it_is_writable_only_when_its_write_has_ended",
    ),
    Mutation(
        "stored-shard-changed-while-it-is-written",
        "offload/disk_stores.py",
        "        if self._write is not None:\n            self._write.wait()\n"
        "        return self._acquire_to_read()",
        "        return self._acquire_to_read()",
        "tests/streams/test_order_statements.py::test_every_ordering_statement_is_in_a_table",
    ),
    Mutation(
        "one-shared-buffer-for-two-chunks",  # state on disk beside a device only
        "offload/host_chunk.py",
        "for _ in range(SHARED_BUFFERS)]",
        "for _ in range(1)]",
        "tests/streams/test_offload_streams.py::test_edits_are_taken_over_exactly",
    ),
    Mutation(
        "page-without-room-for-alignment",  # state on disk only
        "offload/pager.py",
        "return sum(-(-numel * dtype.itemsize // 4096) * 4096 for dtype in dtypes)",
        "return -(-sum(numel * dtype.itemsize for dtype in dtypes) // 4096) * 4096",
        "tests/parity/test_offload.py::test_no_store_changes_a_bit_on_two_ranks",
    ),
    Mutation(
        "planned-sum-of-stage-1-on-disk",  # stage 1, accumulation and state on disk only
        "offload/offload_plan.py",
        "return summed if many else 0, row.reduce.itemsize",
        "return 0, row.reduce.itemsize",
        "tests/accounting/test_tiers.py::test_two_ranks_plan_every_store_to_the_byte",
    ),
    Mutation(
        "worker-forgets-edits-on-the-device",
        "offload/async_update.py",
        "        if transfer.is_edited:\n            host_chunk.copy_param_from_device()\n",
        "",
        "tests/parity/test_offload.py::test_the_update_on_the_worker_gives_the_same_bits",
    ),
    Mutation(
        "hidden-edits-of-shards-on-disk-lost",  # parameters on disk only
        "offload/disk_stores.py",
        "if self._print != _print_of(part_S):",
        "if edited:",
        "tests/parity/test_offload.py::test_an_edit_that_pytorch_does_not_count_is_written_to_the_disk",
    ),
    Mutation(
        "delayed-update-not-waited-for",
        "engine/optimizer_step.py",
        "            pending.wait()\n            unit.all_gather_updated()",
        "            unit.all_gather_updated()",
        "tests/parity/test_offload.py::test_a_delayed_update_reaches_the_parameters_one_step_later",
    ),
    Mutation(
        "early-update-of-a-clipped-step-stands",
        "offload/async_update.py",
        "            or numbers.factor != guess.factor\n",
        "",
        "tests/parity/test_early_update.py::test_some_steps_are_clipped",
    ),
    Mutation(
        "early-update-of-a-step-that-overflows-stands",
        "offload/async_update.py",
        "            or numbers.is_skipped\n",
        "",
        "tests/streams/test_early_streams.py::test_a_step_that_overflows_on_the_device_is_taken_back_by_the_worker",
    ),
    Mutation(
        "early-update-of-an-edited-parameter-stands",
        "offload/async_update.py",
        "            or transfer.is_edited\n",
        "",
        "tests/parity/test_early_update.py::test_a_parameter_that_is_edited_in_place",
    ),
    Mutation(
        "early-update-with-other-options-stands",
        "offload/async_update.py",
        "(early.fused is fused and early.guess.holds_for(groups))",
        "(early.fused is fused)",
        "tests/parity/test_early_update.py::test_what_a_program_does_between_backward_and_step",
    ),
    Mutation(
        "early-update-overwrites-the-gradient",
        "optim/fused_update.py",
        "if grad_R.dtype == self._master_R.dtype and not keeps_grad:",
        "if grad_R.dtype == self._master_R.dtype:",
        "tests/parity/test_early_update.py::test_other_optimizers",
    ),
    Mutation(
        "early-update-not-withdrawn-when-its-gradient-is-taken",
        "offload/grad_store.py",
        "        self._stale()\n        return self.peek()",
        "        return self.peek()",
        "tests/parity/test_early_update.py::test_what_a_program_does_between_backward_and_step",
    ),
    Mutation(
        "early-update-not-withdrawn-when-its-gradient-is-dropped",
        "offload/grad_store.py",
        'for the next gradient."""\n        self._stale()',
        'for the next gradient."""',
        "tests/parity/test_early_update.py::test_what_a_program_does_between_backward_and_step",
    ),
    Mutation(
        "early-update-seen-by-readers-of-optimizer-state",
        "zero/optimizer_object.py",
        '    *("__getitem__", "get", "values", "items",',
        '    *("__getitem__", "get", "items",',
        "tests/unit/test_settled_state.py",
    ),
    Mutation(
        "early-update-seen-by-readers-of-groups",
        "zero/master_piece.py",
        "        if settle is not None and not _asks_shape(func):\n            settle()\n",
        "",
        "tests/parity/test_early_update.py::test_what_a_program_does_between_backward_and_step",
    ),
    Mutation(
        "early-update-survives-a-new-way-to-update",
        "zero/turns.py",
        "            self._early.withdraw()  # the new updaters do not know them",
        "            pass",
        "tests/parity/test_early_update.py::test_what_a_program_does_between_backward_and_step",
    ),
    # ------------------------------------------------------------------ checkpoint
    Mutation(
        "failed-commit-leaves-the-old-one-aside",
        "checkpoint/directory.py",
        "        restore_replaced(final.parent, final.name)\n        raise",
        "        raise",
        "tests/faults/test_checkpoint_faults.py::test_the_old_checkpoint_stays_if_the_new_one_cannot_have_its_name",
    ),
    Mutation(
        "prune-removes-what-latest-names",
        "checkpoint/directory.py",
        "        stays.add(latest(root))\n",
        "        latest(root)\n",
        "tests/unit/test_checkpoint_directory.py::test_prune_keeps_the_newest_and_what_latest_names",
    ),
    Mutation(
        "newest-by-step-instead-of-time",
        "checkpoint/directory.py",
        "sorted((saved.saved_at, saved.step, tag)",
        "sorted((saved.step, saved.saved_at, tag)",
        "tests/unit/test_checkpoint_directory.py -k had_come_further",
    ),
    Mutation(
        "buffer-in-the-file-after-the-last",
        "checkpoint/manifest.py",
        "max(buffer.files) >= num_files",
        "max(buffer.files) > num_files",
        "tests/unit/test_manifest.py::test_each_violation_is_refused_by_name_and_reason",
    ),
    Mutation(
        "converted-pieces-in-one-place",  # another dtype and little memory only
        "checkpoint/restore.py",
        "out[at - low : at - low + part.numel()].copy_(part)",
        "out[: part.numel()].copy_(part)",
        "tests/ranks/test_checkpoints.py::test_another_precision_loads_the_masters",
    ),
    Mutation(
        "new-ranks-draw-what-saved-ranks-draw",  # more ranks than were saved only
        "checkpoint/rng.py",
        "    if rank < len(saved):\n        return saved[rank]\n",
        "    if rank < 2 * len(saved):\n        return saved[rank % len(saved)]\n",
        "tests/unit/test_rng.py::test_new_ranks_get_numbers_of_their_own",
    ),
    Mutation(
        "strip-wider-than-it-is",  # fused layers that are cut over tensor ranks only
        "checkpoint/boxes.py",
        "min(max(rest - self.at, 0), self.width)",
        "max(rest - self.at, 0)",
        "tests/unit/test_boxes.py::test_a_strip_counts_its_elements_before_each_place",
    ),
    Mutation(
        "deepspeed-parts-rounded-down",  # files of stage 3 with sizes that do not divide only
        "checkpoint/deepspeed/slots.py",
        "part = -(-prod(shape) // ranks) if slot.is_cut else prod(shape)",
        "part = prod(shape) // ranks if slot.is_cut else prod(shape)",
        "tests/unit/test_deepspeed_import.py::test_masters_and_moments_come_back",
    ),
    Mutation(
        "last-block-without-checksum",
        "checkpoint/blocks.py",
        "if zlib.crc32(memory) != self._crcs[block]:",
        "if len(memory) == self._block_nbytes and zlib.crc32(memory) != self._crcs[block]:",
        "tests/unit/test_checkpoint_blocks.py::test_one_flipped_bit_is_named_by_its_block",
    ),
    Mutation(
        "second-resume-forgets-the-first",
        "data/data_loader.py",
        "consumed = begun.samples + batches * self._batch_size * sampler.num_replicas",
        "consumed = batches * self._batch_size * sampler.num_replicas",
        "tests/unit/test_resumable_loader.py::test_resumed_twice_in_one_epoch",
    ),
    Mutation(
        "buffers-that-do-not-persist-are-saved",
        "checkpoint/local_state.py",
        "if buffer is not None and name not in owner._non_persistent_buffers_set",
        "if buffer is not None",
        "tests/ranks/test_engine_export.py::test_a_bin_file_is_a_plain_dict_with_all_names",
    ),
    Mutation(
        "export-does-not-wait-for-the-lock",
        "checkpoint/export.py",
        "            fcntl.flock(self._fd, fcntl.LOCK_EX)\n",
        "",
        "tests/unit/test_export.py::test_two_exports_into_one_directory_come_one_after_the_other",
    ),
    Mutation(
        "latest-before-the-checkpoint-is-there",
        "checkpoint/save.py",
        '    places.commit(task.place, root / task.tag, lambda: task.at("aside"))\n'
        '    task.at("committed")\n'
        "    if metadata.save_latest:\n        places.write_durably(root / places.LATEST, task.tag)\n",
        "    if metadata.save_latest:\n        places.write_durably(root / places.LATEST, task.tag)\n"
        '    places.commit(task.place, root / task.tag, lambda: task.at("aside"))\n'
        '    task.at("committed")\n'
        "    if metadata.save_latest:\n",
        "tests/faults/test_checkpoint_faults.py::test_a_save_killed_at_any_point_is_there_as_a_whole_or_not_at_all",
    ),
    # ------------------------------------------------------------------ config
    Mutation(
        "delayed-update-beside-parameters-on-the-host",
        "config/contradictions.py",
        'elif optimizer.delayed_update and param is not None and param.device != "none":',
        'elif optimizer.delayed_update and param is not None and param.device == "nvme":',
        "tests/unit/test_config_errors.py::test_wrong_config_is_answered_with_its_message",
    ),
    Mutation(
        "two-names-of-a-key-that-disagree",
        "config/parse.py",
        "        if parent[new_name] != value:\n",
        "        if parent[new_name] is None:\n",
        "tests/unit/test_config_errors.py::test_wrong_config_is_answered_with_its_message",
    ),
    Mutation(
        "accumulation-without-the-ranks",
        "config/batch.py",
        "return train, micro, train // (micro * dp_size)",
        "return train, micro, train // micro",
        "tests/unit/test_config.py::test_batch_sizes_follow_from_what_is_given",
    ),
    Mutation(
        "default-of-adagrad",
        "config/params.py",
        'lr: Amount = honour(1e-2, "Learning rate.")',
        'lr: Amount = honour(1e-3, "Learning rate.")',
        "tests/unit/test_config_keys.py::test_the_committed_page_is_fresh",
    ),
    # ------------------------------------------------------------------ engine
    Mutation(
        "plain-backward-is-not-divided",  # accumulation with loss.backward() only
        "engine/optimizer_step.py",
        "return 1 if True in self.divided else self.steps",
        "return 1",
        "tests/ranks/test_engine_api.py::test_every_accumulation_loop_gives_the_same_bits",
    ),
    Mutation(
        "no-sync-reduces-at-the-boundary",
        "engine/optimizer_step.py",
        "completes = self.managed and not self.deferred and self.at_boundary()",
        "completes = self.managed and self.at_boundary()",
        "tests/accounting/test_traffic.py::test_nothing_is_reduced_inside_no_sync_below_stage_2",
    ),
    Mutation(
        "uneven-ranks-not-averaged-over-rounds",  # ranks with other numbers of batches, accumulation only
        "engine/optimizer_step.py",
        "ranks = self._active / self._rounds",
        "ranks = self._active",
        "tests/ranks/test_uneven_batches.py::test_join_equals_the_mean_over_the_batches_that_were_there",
    ),
    Mutation(
        "skipped-step-advances-the-schedule",
        "engine/optimizer_step.py",
        "if not skipped and scheduler is not None:",
        "if scheduler is not None:",
        "tests/ranks/test_schedules.py::test_a_skipped_step_does_not_advance_the_schedule",
    ),
    Mutation(
        "shared-loss-takes-the-larger-scale",  # fp16 with two engines only
        "engine/non_finite.py",
        "torch.stack(scales).amin()",
        "torch.stack(scales).amax()",
        "tests/ranks/test_shared_loss.py::test_each_engine_skips_its_own_overflows_and_has_its_own_scale",
    ),
    Mutation(
        "instructions-that-a-program-changed-are-not-run",
        "deepspeed/pipeline_engine.py",
        "        if getattr(kind, name) is not plain or name in own:",
        "        if name in own:",
        "tests/parity/test_pipeline_instructions.py -k derived",
    ),
    Mutation(
        "every-backward-of-instructions-uses-the-last-loss",
        "deepspeed/pipe_instructions.py",
        "            self.loss = self._losses_of.get(buffer_id, self.loss)",
        "            pass",
        "tests/parity/test_pipeline_instructions.py -k whole_schedule",
    ),
    Mutation(
        "gradients-that-a-program-assigned-are-lost",
        "engine/pipeline_parts.py",
        "                buffer.take_grad(at, buffer.unit.params[at])",
        "                buffer.unit.params[at].grad = None",
        "tests/parity/test_pipeline_instructions.py -k two_halves",
    ),
    Mutation(
        "messages-of-instructions-are-not-counted",
        "engine/pipeline_parts.py",
        "                if sent != received:",
        "                if sent < received:",
        "tests/ranks/test_instruction_engine.py -k do_not_fit_together",
    ),
    Mutation(
        "loads-of-a-schedule-on-every-stage",
        "deepspeed/pipe_schedule.py",
        "if is_forward and (self.is_first_stage or self.is_last_stage):",
        "if is_forward:",
        "tests/unit/test_pipe_schedule.py",
    ),
    Mutation(
        "loss-of-a-pipeline-is-a-sum",
        "engine/pipeline.py",
        "scaled = loss / count",
        "scaled = loss",
        "tests/parity/test_pipeline.py::test_pipelines_train_like_plain_pytorch",
    ),
    Mutation(
        "ranks-that-saw-a-loss-are-blamed",
        "engine/non_finite.py",
        "zip(ranks, rows, strict=True) if row[2])",
        "zip(ranks, rows, strict=True) if row[1])",
        "tests/ranks/test_nan_policy.py::test_one_rank_has_a_bad_loss_in_the_third_of_four_steps",
    ),
    # ------------------------------------------------------------------ parallel
    Mutation(
        "smoothing-left-out-of-a-gradient",  # label smoothing only
        "parallel/tensor_sums.py",
        "hit = own_N.to(grad_Nv.dtype) * (1.0 - ctx.smoothing)",
        "hit = own_N.to(grad_Nv.dtype)",
        "tests/ranks/test_vocab_cross_entropy.py::test_every_option_gives_the_loss_and_gradient_of_the_whole_logits",
    ),
    Mutation(
        "stage-wants-gradients-of-all-inputs",
        "parallel/pipeline_stage.py",
        "tensor.requires_grad_(boundary.requires_grad and self.has_backward)",
        "tensor.requires_grad_(tensor.is_floating_point() and self.has_backward)",
        "tests/ranks/test_pipeline_stage.py -k several_tensors",
    ),
    Mutation(
        "first-stage-runs-one-forward-more",
        "parallel/schedules.py",
        "before=ranks - 1 - rank)",
        "before=ranks - rank)",
        "tests/unit/test_pipeline_schedules.py::test_docstrings_are_right",
    ),
    Mutation(
        "joined-weights-of-a-program-are-one-matrix",
        "parallel/program_parts.py",
        "if stride > 1:",
        "if stride > 9:",
        "tests/ranks/test_program_parts.py -k one_process_and_its",
    ),
    Mutation(
        "sequence-marks-of-a-program-add-nothing",
        "parallel/program_parts.py",
        'getattr(param, "sequence_parallel", False):',
        'getattr(param, "sequence_parallels", False):',
        "tests/ranks/test_program_parts.py -k one_process_and_its",
    ),
    Mutation(
        "gradients-that-a-hook-adds-are-added-again",
        "zero/copy_sums.py",
        "whole = flags_WF.amin(0) > 0",
        "whole = flags_WF.amin(0) > 1",
        "tests/ranks/test_program_parts.py -k hook",
    ),
    Mutation(
        "gradients-that-a-hook-looks-at-are-not-added",
        "zero/copy_sums.py",
        "whole = flags_WF.amin(0) > 0",
        "whole = flags_WF.amax(0) > 0",
        "tests/ranks/test_program_parts.py -k looks_at_gradients",
    ),
    Mutation(
        "copies-of-cut-experts-are-whole",
        "experts/layer.py",
        "            copy_part_marks(source, target)\n",
        "            pass\n",
        "tests/ranks/test_program_parts.py -k experts",
    ),
    Mutation(
        "loaded-experts-get-other-numbers",
        "experts/layer.py",
        "        self.keep_numbers = True\n",
        "        pass\n",
        "tests/ranks/test_expert_errors.py::test_experts_that_were_loaded_or_trained_keep_their_numbers",
    ),
    Mutation(
        "whole-experts-are-parts",
        "experts/layer.py",
        "        clear_part_marks(param)\n",
        "        pass\n",
        "tests/ranks/test_program_parts.py -k experts",
    ),
    Mutation(
        "zero-init-shards-parts-over-all-ranks",
        "zero/init.py",
        "self.mesh = mesh_of_parts(parsed, mpu, mesh)",
        "mesh_of_parts(parsed, mpu, mesh)",
        "tests/ranks/test_first_values.py -k zero_init_takes",
    ),
    Mutation(
        "any-model-of-zero-init-fits-a-mesh",
        "zero/init_mesh.py",
        "    if wanted == (1, 1):\n",
        "    if wanted:\n",
        "tests/ranks/test_program_parts.py -k contradict",
    ),
    Mutation(
        "tensor-ranks-drop-the-same-features",
        "parallel/cut_layer.py",
        "seed = (draw + (self._rank + 1) * _ODD) % 2**63",
        "seed = (draw + _ODD) % 2**63",
        "tests/ranks/test_dropout_streams.py::test_masks_differ_where_activations_are_cut",
    ),
    Mutation(
        "modules-draw-the-same-first-values",
        "parallel/initial_values.py",
        'f"{seed} {name}".encode()',
        'f"{seed}".encode()',
        "tests/ranks/test_tensor_plans_on_ranks.py::test_a_model_on_the_meta_device_starts_as_in_one_process",
    ),
    Mutation(
        "as-many-ranks-share-a-head-as-there-are-heads",  # numbers other than a square only
        "parallel/heads.py",
        "found[name] = size // heads",
        "found[name] = heads",
        "tests/ranks/test_tensor_plans_of_families.py::test_ranks_share_key_value_heads",
    ),
    Mutation(
        "gradient-of-a-cut-layer-not-added",
        "parallel/tensor_sums.py",
        'return _sum(grad, ctx.group, "gradients of a layer\'s input"), None',
        "return grad, None",
        "tests/ranks/test_tensor_plans_on_ranks.py::test_forward_loss_and_gradients_are_those_of_one_process",
    ),
    # ------------------------------------------------------------------ sequence
    Mutation(
        "heads-in-another-order",  # a rank gets every P-th head, and the result has them rank by rank
        "sequence/all_to_all.py",
        "x.unflatten(cut, (group.size(), -1)).movedim(cut, 0)",
        "x.unflatten(cut, (-1, group.size())).movedim(cut + 1, 0)",
        "tests/parity/test_sequence_parallel.py::test_two_sequence_ranks_equal_one_process",
    ),
    Mutation(
        "key-value-heads-beside-other-queries",  # only with fewer of them than ranks, and more than one
        "sequence/attention.py",
        "(x.repeat_interleave(copies, 1) for x in (key, value))",
        "(x.repeat(1, copies, 1, 1) for x in (key, value))",
        "tests/parity/test_sequence_parallel.py::"
        "test_four_ranks_in_data_and_sequence_equal_one_process",
    ),
    Mutation(
        "packed-samples-see-each-other",  # across the border of ranks
        "sequence/token_positions.py",
        "return TokenPositions(all_RT, packed)",
        "return TokenPositions(all_RT, False)",
        "tests/parity/test_sequence_parallel.py::test_two_sequence_ranks_equal_one_process",
    ),
    Mutation(
        "later-batches-of-a-pipeline-not-compared",
        "engine/pipeline_batches.py",
        "checksum = digest(batch, checksum)",
        "checksum = digest(batches[0])",
        "tests/parity/test_sequence_pipeline.py"
        "::test_later_micro_batches_that_differ_are_the_same_error_on_every_rank",
    ),
    Mutation(
        "own-loss-of-a-pipeline-of-one-sequence-rank",
        "engine/pipeline_batches.py",
        "model.loss_fn.over_ranks = None if made is None else made.mean",
        "model.loss_fn.over_ranks = None",
        "tests/parity/test_sequence_pipeline.py"
        "::test_the_models_own_loss_is_the_mean_over_all_tokens",
    ),
    Mutation(
        "accumulation-ends-with-the-first-piece",
        "integrations/accelerate/sequences.py",
        "at_end and number + 1 == self.sp_world_size",
        "at_end",
        "tests/compat/test_sequence_programs.py"
        "::test_an_accumulation_ends_with_the_last_piece_of_the_last_batch",
    ),
    Mutation(
        "sequence-gradients-are-summed",
        "engine/draft.py",
        "(self.mesh.sequence if averages else 1)",
        "1",
        "tests/parity/test_sequence_parallel.py::test_two_sequence_ranks_equal_one_process",
    ),
    # ------------------------------------------------------------------ watchdog
    Mutation(
        "ranks-that-left-blamed-before-a-stopped-one",
        "watchdog/diagnosis.py",
        '        ("stopped", case.frozen),  # before the ranks that left because of it\n'
        '        ("waits", case.frozen),\n        ("left", case.lost),\n',
        '        ("left", case.lost),\n        ("stopped", case.frozen),\n'
        '        ("waits", case.frozen),\n',
        "tests/unit/test_flight_recorder.py -k stopped_rank_comes",
    ),
    Mutation(
        "many-ranks-blamed-for-one",
        "watchdog/diagnosis.py",
        "groups = sorted(calls.values(), key=lambda g: (-len(g[1]), min(g[1])))",
        "groups = sorted(calls.values(), key=lambda g: min(g[1]))",
        "tests/unit/test_flight_recorder.py -k unequal_groups",
    ),
    Mutation(
        "newest-report-of-a-dead-run-ignored",
        "watchdog/dead_run.py",
        "last.diagnosis.fatal or last.seq >= newest",
        "last.diagnosis.fatal or last.seq > newest",
        "tests/unit/test_dead_run.py::test_a_report_that_did_not_end_the_run_is_not_the_cause",
    ),
    Mutation(
        "slow-rank-compared-with-itself",
        "watchdog/pace.py",
        "(ordered[k if k < at else k + 1]",
        "(ordered[k if k <= at else k + 1]",
        "tests/unit/test_stragglers.py::test_one_slow_rank_is_named",
    ),
    Mutation(
        "ranks-stop-at-the-point-itself",
        "watchdog/stop_agreement.py",
        "return point > self.stop",
        "return point >= self.stop",
        "tests/unit/test_stop_agreement.py::test_ranks_that_meet_in_each_step_stop_after_the_same_one",
    ),
    # ------------------------------------------------------------------ launch
    Mutation(
        "each-rank-gets-all-cores",
        "launch/rank_env.py",
        "str(max(1, cores // num_local))",
        "str(max(1, cores))",
        "tests/unit/test_launch_plan.py::test_cores_are_divided_among_the_local_ranks",
    ),
    Mutation(
        "devices-of-slots-not-looked-up",
        "launch/rank_env.py",
        'return ",".join(visible[slot] for slot in slots if slot < len(visible))',
        'return ",".join(str(slot) for slot in slots if slot < len(visible))',
        "tests/unit/test_launch_hosts.py -k devices",
    ),
    Mutation(
        "lowest-rank-is-the-culprit",
        "run/exit_report.py",
        "ordered = sorted(deaths, key=lambda death: (death.at_s, death.rank))",
        "ordered = sorted(deaths, key=lambda death: death.rank)",
        "tests/unit/test_launch_exit_report.py::test_of_two_causes_the_earlier_one_comes_first",
    ),
    Mutation(
        "exit-code-of-a-signal",
        "run/exit_report.py",
        "exitcode=code if code > 0 else 128 - code",
        "exitcode=code if code > 0 else 128 + code",
        "tests/unit/test_launch_exit_report.py::test_the_launcher_ends_with_the_code_of_the_cause",
    ),
    Mutation(
        "one-restart-too-few",
        "launch/restart.py",
        "if len(attempts) > max_restarts:",
        "if len(attempts) >= max_restarts:",
        "tests/unit/test_launch_restart.py::test_a_failure_with_a_newer_checkpoint_is_restarted_soon",
    ),
    Mutation(
        "stopped-rank-left-alone-after-a-failure",
        "launch/supervisor.py",
        "            self._enter(Phase.GRACE, now_s + self._patience.grace_s)\n"
        "            self._kill_frozen()\n",
        "            self._enter(Phase.GRACE, now_s + self._patience.grace_s)\n",
        "tests/unit/test_launch_supervisor.py::test_a_stopped_rank_is_killed_as_soon_as_another_one_failed",
    ),
    Mutation(
        "half-a-host-takes-part-under-slurm",
        "launch/restart.py",
        "return () if whole and slots != host.slots else slots",
        "return slots",
        "tests/unit/test_next_ranks.py::test_under_slurm_a_host_takes_part_with_all_its_slots",
    ),
    # ------------------------------------------------------------------ planner
    Mutation(
        "positions-off-by-one",
        "planner/planned_batch.py",
        "guesses.add(asked.length - (error.index - error.rows + 1))",
        "guesses.add(asked.length - (error.index - error.rows))",
        "tests/unit/test_positions.py::test_the_limit_is_that_of_the_real_model",
    ),
    Mutation(
        "expanded-input-counted-in-full",
        "planner/step_log.py",
        "numel *= size if stride or not size else 1",
        "numel *= size",
        "tests/unit/test_step_time.py::test_an_expanded_input_is_in_memory_once",
    ),
    Mutation(
        "ring-sends-its-own-part-too",
        "planner/prices.py",
        "return passes * (size - 1) / size",
        "return float(passes)",
        "tests/unit/test_step_time.py::test_a_collective_takes_its_latency_and_the_bytes_that_a_rank_sends",
    ),
    # ------------------------------------------------------------------ deepspeed
    Mutation(
        "tensor-ranks-outside-of-data-ranks",
        "deepspeed/topology.py",
        'axes=["pipe", "data", "model"], dims=[num_pp, num_dp, num_mp]',
        'axes=["pipe", "model", "data"], dims=[num_pp, num_mp, num_dp]',
        "tests/unit/test_topology.py::test_a_table_for_twelve_ranks",
    ),
    Mutation(
        "static-loss-scale-called-dynamic",
        "deepspeed/engine.py",
        '"dynamic_loss_scale": lambda engine: engine.scales_loss and not engine.settings.fp16.loss_scale',
        '"dynamic_loss_scale": lambda engine: engine.scales_loss',
        "tests/unit/test_deepspeed_getters.py",
    ),
    Mutation(
        "smaller-elastic-batch-preferred",
        "deepspeed/config_model.py",
        "size if larger else -size",
        "-size if larger else size",
        "tests/unit/test_deepspeed_tools.py -k elastic",
    ),
    Mutation(
        "saved-view-keeps-its-storage",
        "deepspeed/helpers.py",
        "return moved.clone() if moved.data_ptr() == item.data_ptr() else moved",
        "return moved",
        "tests/unit/test_deepspeed_helpers.py::test_tensors_are_cloned_out_of_what_they_are_views_of",
    ),
    Mutation(
        "timer-adds-to-what-it-drops",
        "deepspeed/monitors.py",
        "self._sum_s = passed_s if reset else self._sum_s + passed_s",
        "self._sum_s = self._sum_s + passed_s",
        "tests/unit/test_deepspeed_helpers.py -k timer",
    ),
    # ------------------------------------------------------------------ integrations
    Mutation(
        "accelerate-does-not-divide",
        "integrations/accelerate/accelerator.py",
        "            loss = loss / self.gradient_accumulation_steps\n",
        "            loss = loss * 1.0\n",
        "tests/compat/test_accelerate_by_name.py::test_accumulate_ends_a_step_with_the_loader_as_under_ddp",
    ),
    Mutation(
        "checkpoints-sorted-as-text",
        "integrations/resuming.py",
        "key=lambda path: int(_number(path)[1])",
        "key=lambda path: _number(path)[1]",
        "tests/ranks/test_newest_checkpoint.py::test_the_newest_complete_and_undamaged_one_is_found",
    ),
    # ------------------------------------------------------------------ experts
    Mutation(
        "experts-sharded-over-all-ranks",
        "engine/unit_plan.py",
        "return _Kind(param.requires_grad and is_updated, row, ranks_of_layer(param, fqn))",
        "return _Kind(param.requires_grad and is_updated, row, 1)",
        "tests/parity/test_experts.py::test_two_ranks_that_share_experts_equal_one_process",
    ),
    Mutation(
        "sums-of-experts-without-replicas",
        "session/comm_session.py",
        "self.experts[kind.experts] = TwoHopComm(self.experts[kind.experts], comms[0])",
        "TwoHopComm(self.experts[kind.experts], comms[0])",
        "tests/parity/test_experts.py::test_replicas_of_sharded_experts_equal_one_process",
    ),
    Mutation(
        "experts-over-replicas-counted-in-one",
        "engine/shared_units.py",
        "apart = {*names, *names_over_replicas(draft)}",
        "apart = {*names}",
        "tests/parity/test_experts.py::test_replicas_shard_the_experts_of_which_each_has_one_copy",
    ),
    Mutation(
        "gradients-of-experts-asked-of-one-replica",
        "engine/shared_units.py",
        "torch.tensor(draft.mesh.same_experts(rank, size), device=draft.device),",
        "torch.tensor(draft.mesh.expert_group(rank, size), device=draft.device),",
        "tests/parity/test_experts.py::test_a_gradient_in_one_replica_counts_in_all",
    ),
    Mutation(
        "results-of-experts-in-the-order-of-experts",
        "experts/dispatch.py",
        "return torch.cat([of_expert[rank] for rank in range(len(got_PL)) for of_expert in split])",
        "return torch.cat(done)",
        "tests/parity/test_experts.py::test_two_ranks_that_share_experts_equal_one_process",
    ),
    Mutation(
        "experts-numbered-by-rank",
        "experts/layer.py",
        "first = place * self.num_local_experts",
        "first = 0",
        "tests/parity/test_experts.py::test_two_ranks_that_share_experts_equal_one_process",
    ),
    Mutation(
        "layouts-not-compared",
        "engine/build.py",
        'shared = {"parameter": layout_digest(draft.specs)}',
        'shared = {"parameter": ""}',
        "tests/ranks/test_mesh_mistakes.py::test_mistakes_with_experts_and_nodes_are_errors_on_every_rank",
    ),
    Mutation(
        "arguments-of-layers-not-compared",
        "engine/shared_units.py",
        "settings[name] = layer.settings",
        'settings[name] = ""',
        "tests/ranks/test_mesh_mistakes.py::test_mistakes_with_experts_and_nodes_are_errors_on_every_rank",
    ),
    Mutation(
        "unequal-places-are-sent",
        "experts/dispatch.py",
        "seen = _of_all_ranks(places, group)",
        "seen = []",
        "tests/ranks/test_mesh_mistakes.py::test_mistakes_with_experts_and_nodes_are_errors_on_every_rank",
    ),
    Mutation(
        "a-layer-with-the-weight-of-an-expert",
        "experts/placement.py",
        "    _refuse_shared(model)\n    sizes = set()",
        "    sizes = set()",
        "tests/ranks/test_mesh_mistakes.py::test_mistakes_with_experts_and_nodes_are_errors_on_every_rank",
    ),
    Mutation(
        "attention-of-one-rank-is-enough",
        "engine/draft.py",
        "    check_attention(model, mesh.sequence)\n",
        "",
        "tests/ranks/test_mesh_mistakes.py::test_mistakes_with_sequence_ranks_are_errors_on_every_rank",
    ),
    Mutation(
        "tokens-of-ranks-not-compared",
        "sequence/attention.py",
        "if found != seen[0]:",
        "if found is None:",
        "tests/ranks/test_mesh_mistakes.py::test_mistakes_with_sequence_ranks_are_errors_on_every_rank",
    ),
    Mutation(
        "another-router-in-silence",
        "config/mesh_keys.py",
        "    if wrong:\n",
        "    if False:\n",
        "tests/unit/test_mesh_sources.py::test_the_keys_of_expert_parallelism_are_checked",
    ),
    Mutation(
        "any-capacity-factor",
        "experts/gate.py",
        "            _check_factor(name, factor)",
        "            pass",
        "tests/unit/test_expert_layers.py::test_a_wrong_argument_is_named",
    ),
    Mutation(
        "second-choices-before-first-ones",
        "experts/gate.py",
        "place2_SE = second_SE.cumsum(0) - 1 + mask_SE.sum(0)",
        "place2_SE = second_SE.cumsum(0) - 1",
        "tests/unit/test_expert_layers.py::test_places_go_to_first_choices_first",
    ),
    Mutation(
        "experts-of-other-ranks-unknown-to-a-load",
        "engine/checkpoint_loader.py",
        "if self.mesh.pipeline * self.mesh.expert == 1:",
        "if self.mesh.pipeline == 1:",
        "tests/ranks/test_expert_checkpoints.py::test_other_ranks_continue",
    ),
    Mutation(
        "gradient-of-another-expert-counts",
        "zero/clip.py",
        "for words_WK, theirs in () if fake else seen.apart:",
        "for words_WK, theirs in ():",
        "tests/unit/test_expert_layers.py::test_a_gradient_of_an_expert_counts_if_its_own_holders_have_one",
    ),
    Mutation(
        "experts-of-other-ranks-exported-as-own",
        "engine/expert_export.py",
        "if link is None or not place:",
        "if True:",
        "tests/ranks/test_expert_export.py::test_all_experts_are_written",
    ),
    Mutation(
        "stacked-experts-exported-in-place-0",
        "engine/expert_export.py",
        "all_N[place * slot.numel :][: part.numel()] = part",
        "all_N[: part.numel()] = part",
        "tests/parity/test_transformers_experts.py::test_all_experts_are_exported",
    ),
    Mutation(
        "buffers-of-experts-from-rank-0",
        "engine/build.py",
        "watch.experts.get(size, watch.gathers)",
        "watch.gathers",
        "tests/ranks/test_expert_export.py::test_buffers_are_those_of_the_experts_of_each_rank",
    ),
    Mutation(
        "experts-of-deepspeed-numbered-by-rank",
        "checkpoint/deepspeed/files.py",
        "{place * counts[match[1]] + int(match[2])}",
        "{int(match[2])}",
        "tests/unit/test_deepspeed_experts.py::test_masters_and_moments_of_all_experts_come_back",
    ),
    Mutation(
        "experts-of-deepspeed-held-by-neighbours",
        "checkpoint/deepspeed/files.py",
        "mesh = Mesh(data_shard=ranks, data_before_expert=int(data_first))",
        "mesh = Mesh(data_shard=ranks)",
        "tests/unit/test_deepspeed_experts.py::test_masters_and_moments_of_all_experts_come_back",
    ),
    Mutation(
        "experts-sharded-over-all-ranks-while-built",
        "zero/init.py",
        "inner.comm = watch.experts[size]",
        "inner.comm = self.comm",
        "tests/ranks/test_expert_init.py::test_the_results_are_those_of_one_process",
    ),
    Mutation(
        "planned-tokens-of-one-rank",
        "experts/dispatch.py",
        "return [counts[at : at + own] for at in range(0, experts, own)], [counts[:own]] * size",
        "return [counts[at : at + own] for at in range(0, experts, own)], [counts[:own]]",
        "tests/accounting/test_expert_plans.py::test_messages_are_those_of_tokens_and_of_places",
    ),
    Mutation(
        "experts-taken-by-an-outer-block",
        "experts/marks.py",
        "        for block in _OPEN:\n            stack.enter_context(block.other_experts())\n",
        "",
        "tests/ranks/test_expert_init.py::test_initializers_reach_experts_inside_the_block",
    ),
    Mutation(
        "streams-of-random-numbers-not-replayed",
        "deepspeed/activations.py",
        "now, self.states_ = self.states_, dict(at_first)",
        "now = self.states_",
        "tests/unit/test_rng_tracker.py::test_activations_are_computed_again_with_the_numbers_of_forward",
    ),
    Mutation(
        "outlines-where-constructors-say",
        "deepspeed/pipeline_layers.py",
        'given["device"] = torch.device("meta")',
        "pass",
        "tests/unit/test_pipeline_layers.py::test_the_outline_of_a_layer_that_names_its_device_has_no_memory_and_draws_nothing",
    ),
    Mutation(
        "outlines-draw-from-streams",
        "deepspeed/pipeline_layers.py",
        "        tracker.states_ = streams\n",
        "",
        "tests/unit/test_pipeline_layers.py::test_streams_are_restored_after_a_layer_that_had_to_draw",
    ),
    # ------------------------------------------------------------------ device, testing
    Mutation(
        "copy-to-the-host-not-recorded",  # streams of a device only
        "device/copy_streams.py",
        "            self._ops.record_use(source)\n",
        "",
        "tests/streams/test_offload_streams.py::test_no_gradient_is_on_the_device_between_backward_and_step",
    ),
    Mutation(
        "copy-to-the-device-does-not-wait",  # streams of a device only
        "device/copy_streams.py",
        "        if not at_once:\n            self._up.wait_stream(self._ops.current_stream())\n",
        "",
        "tests/unit/test_cuda_order.py::test_a_copy_up_is_behind_the_current_stream_unless_it_is_known_to_be_free",
    ),
    Mutation(
        "checker-takes-all-streams-for-recorded",
        "testing/src/zeroshard_testing/streams/machine.py",
        "for stream in block.recorded:",
        "for stream in self.streams:",
        "tests/streams/test_checker.py::test_a_program_and_its_mistake",
    ),
    # ------------------------------------------------------------------ doctor, report, cli, memory
    Mutation(
        "too-many-threads-only-where-cores-are-many",
        "doctor/verdicts.py",
        "(int(given) > each or each >= 4)",
        "(int(given) > each and each >= 4)",
        "tests/unit/test_doctor_verdicts.py::test_each_fault_of_the_facts_has_its_code",
    ),
    Mutation(
        "unknown-value-drawn-as-zero",
        "report/record.py",
        "number = math.nan if value is None else float(value)",
        "number = 0.0 if value is None else float(value)",
        "tests/unit/test_report.py::test_a_page_shows_curves_memory_traffic_and_the_configuration",
    ),
    Mutation(
        "verify-of-damage-succeeds",
        "cli/ckpt.py",
        "    if problems:\n        raise typer.Exit(1)\n",
        "",
        "tests/unit/test_ckpt_cli.py::test_verify_reads_all_bytes",
    ),
    Mutation(
        "free-memory-is-the-larger-number",
        "memory/host_limits.py",
        "return min((n for n in known if n is not None), default=None)",
        "return max((n for n in known if n is not None), default=None)",
        "tests/unit/test_host_memory.py::test_free_memory_is_the_smaller_of_host_and_cgroup",
    ),
]

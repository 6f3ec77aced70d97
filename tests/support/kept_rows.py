"""Tests of which `make test` runs some rows only, because all rows take seconds of processors.

`make test-full` runs all of them. Chosen by measuring each test: of one that takes more than four seconds
so many rows stay as take about four. Tests of one row are left out if others show the same in less time.
`tools/mutations.py` says whether what is left still finds every mistake of its list.
"""

from __future__ import annotations

ROWS: dict[str, dict[str, int | tuple[str, ...]]] = {
    "accounting/test_checkpoint_peak.py": {
        "test_save_and_load_need_less_than_the_ceiling": 1,
    },
    "accounting/test_construction_peak.py": {
        "test_resident_memory_stays_under_the_shards_and_one_unit": 1,
        "test_tensors_stay_under_the_shards_and_the_largest_unit_as_it_is_built": 1,
    },
    "accounting/test_life.py": {
        "test_many_steps_leave_memory_flat": 1,
    },
    "accounting/test_live_bytes.py": {
        "test_padding_frozen_and_tied_parameters_are_planned": 3,
        "test_the_state_of_every_optimizer_is_planned": 5,
    },
    "accounting/test_planned_checkpoints.py": {
        "test_files_and_memory_of_a_checkpoint_are_planned": 1,
    },
    "accounting/test_plans_and_runs.py": {
        "test_a_plan_is_what_the_run_needs": 1,
        "test_a_model_cut_over_tensor_ranks_needs_what_its_plan_says": 1,
    },
    "accounting/test_promises_of_changes.py": {
        "test_a_change_frees_at_least_what_is_said": 0,
    },
    "accounting/test_simulation.py": {
        "test_bytes_are_those_of_the_formula": 3,
        "test_traffic_of_each_group_is_that_of_the_formula": 1,
        "test_every_message_has_its_partner": 1,
        "test_ranks_that_share_key_value_heads_add_their_gradients_once_per_step": 1,
    },
    "accounting/test_tiers.py": {
        "test_a_hundred_steps_with_everything_on_disk_leave_memory_flat": 0,
        "test_all_live_memory_is_in_the_ledger_on_two_ranks": 0,
    },
    "compat/test_accelerate_by_name.py": {
        "test_losses_norms_and_rates_are_those_of_ddp": 1,
    },
    "compat/test_accelerate_meshes.py": {
        "test_tensor_ranks_get_the_same_samples_and_train_as_one_process": 1,
    },
    "compat/test_bad_consumers.py": {
        "test_a_library_that_is_too_old_is_refused_on_every_rank": 1,
    },
    "compat/test_host_cost.py": {
        "test_a_smoke_run_compares_the_modules_of_tensor_parallelism": 0,
    },
    "compat/test_mesh_examples.py": {
        "test_a_llama_over_tensor_ranks_has_the_losses_of_one_rank": 0,
    },
    "compat/test_peft.py": {
        "test_losses_are_the_same_at_every_stage_with_and_without_checkpointing": 0,
    },
    "compat/test_pipeline_programs.py": {
        "test_a_tied_gpt_trains_like_one_process": 2,
    },
    "compat/test_recipes.py": {
        "test_llava_resumes_on_fewer_ranks": 0,
    },
    "compat/test_saved_by_programs.py": {
        "test_adapters_that_are_gathered_one_by_one_load_and_are_right": 1,
    },
    "compat/test_trainer_by_name.py": {
        "test_losses_norms_rates_and_evaluation_are_those_of_ddp": 1,
    },
    "compat/test_trainer_tensor_parallel.py": {
        "test_the_trainer_with_autotp_size_is_that_of_one_process": 1,
    },
    "faults/test_checkpoint_damage.py": {
        "test_damage_is_named_and_the_one_before_is_taken": 8,
    },
    "faults/test_checkpoint_faults.py": {
        "test_a_save_killed_at_any_point_is_there_as_a_whole_or_not_at_all": 8,
    },
    "faults/test_doctor_probes.py": {
        "test_values_of_collectives_are_checked": 1,
    },
    "faults/test_engine_faults.py": {
        "test_uneven_ranks_raise_nothing_in_500_steps": 0,
    },
    "faults/test_launcher.py": {
        "test_a_launcher_without_standard_streams_runs_its_ranks": 1,
    },
    "faults/test_mesh_checkpoint_faults.py": {
        "test_a_killed_save_is_there_as_a_whole_or_not_at_all": 2,
    },
    "faults/test_restart_hosts.py": {
        "test_a_slot_that_fails_the_users_check_is_left_out": 0,
    },
    "faults/test_silent_stack.py": {
        "test_a_program_is_not_ended_or_disturbed": 2,
    },
    "parity/test_complex_parameters.py": {
        "test_every_transport_adds_complex_gradients": 2,
    },
    "parity/test_graphs.py": {
        "test_every_stage_gives_the_same_bits_and_plain_pytorch": 5,
    },
    "parity/test_meshes.py": {
        "test_offload_changes_no_bit_of_a_pipeline": 2,
        "test_offload_changes_no_bit_on_eight_ranks": 1,
        "test_recomputed_blocks_give_the_same_numbers_in_three_dimensions": 1,
        "test_16_bit_in_three_dimensions": 1,
        "test_edits_of_whole_tensors_reach_all_parts_in_three_dimensions": 1,
        "test_an_overflow_of_one_stage_is_a_skipped_step_on_all_ranks": 1,
        "test_the_position_in_the_data_is_saved_and_shared_out_on_another_mesh": 1,
        "test_two_stages_give_the_bits_of_one_rank": 1,
        "test_offload_changes_no_bit_on_four_ranks": 1,
        "test_exports_have_whole_tensors": 1,
    },
    "parity/test_offload.py": {
        "test_the_update_on_the_worker_gives_the_same_bits": ("1", "3"),
        "test_no_store_changes_a_bit_on_two_ranks": 3,
        "test_no_store_changes_a_bit_at_any_stage_and_precision": 4,
        "test_a_bus_between_device_and_host_changes_no_bit": 4,
        "test_gradients_on_disk_change_no_bit_on_one_rank": 2,
        "test_gradients_on_disk_change_no_bit_on_three_ranks": 0,
    },
    "parity/test_pipeline_module.py": {
        "test_four_steps_are_those_of_plain_pytorch": 1,
    },
    "parity/test_replicas.py": {
        "test_two_replicas_of_two_shards_equal_one_plain_process": 2,
        "test_replicas_of_a_tensor_parallel_model_train_as_one_process": 1,
    },
    "parity/test_resuming.py": {
        "test_every_kind_loads_what_any_other_saved": 2,
    },
    "parity/test_several_ranks.py": {
        "test_two_ranks_equal_one_process": ("transformer", "experts", "bare_parameters", "unused"),
        "test_three_ranks_equal_one_process": 5,
    },
    "parity/test_tensor_parallel_training.py": {
        "test_tensor_and_data_ranks_train_as_one_process": 2,
    },
    "parity/test_transformers_pipeline.py": {
        "test_models_train_like_the_plain_model": 1,
        "test_a_pipeline_is_cut_over_tensor_ranks_by_its_configuration": 0,
    },
    "programs/test_tasks.py": {
        "test_a_task_trains_as_under_ddp_and_its_checkpoint_resumes_on_as_many_ranks_and_on_fewer": 1,
        "test_ppo_with_three_engines_trains_as_under_ddp_and_resumes_on_fewer_ranks": 0,
    },
    "ranks/test_access.py": {
        "test_full_gradient_during_accumulation_is_the_sum_so_far": ("1-fp32", "1-fp16", "3-bf16"),
        "test_full_gradient_is_the_mean_of_the_ranks_unscaled": 2,
    },
    "ranks/test_adapters_on_tensor_ranks.py": {
        "test_adapters_train_as_in_one_process": 1,
    },
    "ranks/test_aliases.py": {
        "test_every_reader_of_parameters_in_backward_gets_their_values": 3,
        "test_aliases_have_the_new_values_when_step_returns": 2,
    },
    "ranks/test_checkpoint_matrix.py": {
        "test_a_checkpoint_of_an_older_release_loads_into_every_mesh": 3,
    },
    "ranks/test_checkpoints.py": {
        "test_nodes_without_a_shared_directory_save_apart_and_send_what_is_missing": 2,
    },
    "ranks/test_checkpoints_on_meshes.py": {
        "test_a_tensor_parallel_run_continues_on_any_ranks": 1,
    },
    "ranks/test_compiled_blocks.py": {
        "test_a_run_has_the_bits_of_one_that_is_not_compiled": 1,
    },
    "ranks/test_copy_sums.py": {
        "test_offload_changes_no_bit": 1,
        "test_a_step_has_one_message_in_each_tensor_group": 1,
        "test_gradients_can_be_read_and_set_and_more_may_come": 1,
        "test_kinds_of_gradients_are_learned_from_a_model_that_torch_has_cut": 1,
        "test_key_value_heads_on_several_ranks_have_one_message_per_step": 0,
    },
    "ranks/test_engine_api.py": {
        "test_every_accumulation_loop_gives_the_same_bits": 1,
    },
    "ranks/test_engine_export.py": {
        "test_from_pretrained_loads_what_save_pretrained_wrote": 1,
    },
    "ranks/test_first_values.py": {
        "test_every_layout_starts_equal": 1,
    },
    "ranks/test_fused_layers.py": {
        "test_checkpoints_have_the_order_of_the_model": 1,
        "test_training_is_that_of_one_process": 1,
    },
    "ranks/test_grads_of_programs.py": {
        "test_two_ranks_train_as_the_plain_program": 1,
    },
    "ranks/test_kept_state.py": {
        "test_a_step_has_the_bits_of_plain_pytorch": 3,
        "test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped": 3,
    },
    "ranks/test_nan_policy.py": {
        "test_one_rank_has_a_bad_loss_in_the_third_of_four_steps": 8,
    },
    "ranks/test_offload_states.py": {
        "test_gradients_in_memory_that_ranks_share_move_too": 1,
        "test_reading_a_parameter_that_is_away_raises": 6,
        "test_a_move_changes_no_bit_on_two_ranks": 1,
        "test_calls_that_need_what_is_away_say_so_on_every_rank": 5,
    },
    "ranks/test_optimizer_classes.py": {
        "test_elementwise_classes_equal_plain_pytorch_at_every_stage": 4,
    },
    "ranks/test_out_of_memory.py": {
        "test_a_run_that_did_not_fit_fits_with_each_printed_change": 1,
    },
    "ranks/test_partitioned_activations.py": {
        "test_gradients_keep_their_bits_and_a_rank_keeps_half": 1,
    },
    "ranks/test_pipeline_engine.py": {
        "test_traffic_of_a_step_in_the_group_of_each_stage": 1,
    },
    "ranks/test_precision.py": {
        "test_the_loss_scale_follows_the_rule_when_one_rank_overflows": 2,
    },
    "ranks/test_schedules.py": {
        "test_torch_schedules_act_as_in_plain_pytorch": 2,
    },
    "ranks/test_several_forwards.py": {
        "test_forwards_in_flight_change_no_bit_and_gather_no_more": 3,
    },
    "ranks/test_tensor_parallel.py": {
        "test_stages_agree_in_16_bit": 1,
        "test_offload_changes_no_bit": 1,
    },
    "ranks/test_tensor_plans_of_families.py": {
        "test_shared_heads_train_and_are_saved_once": 1,
        "test_a_family_trains_on_tensor_and_data_ranks_as_in_one_process": 1,
        "test_a_family_by_its_own_plan": 3,
        "test_gpt2_trains_by_autotp_size_as_in_one_process": 1,
    },
    "ranks/test_three_dimensions.py": {
        "test_four_steps_are_those_of_one_plain_process": 1,
    },
    "ranks/test_tied_stages.py": {
        "test_a_vocabulary_cut_over_tensor_ranks_may_be_tied_over_stages": 1,
    },
    "ranks/test_traced_plans.py": {
        "test_a_family_trains_by_autotp_size_on_tensor_and_data_ranks": 1,
        "test_a_family_computes_what_one_process_computes": 3,
    },
    "streams/test_budgets.py": {
        "test_a_steady_step": 14,
    },
    "streams/test_memory_of_a_device.py": {
        "test_each_printed_change_makes_the_run_fit": 1,
    },
    "streams/test_plans_of_a_device.py": {
        "test_a_gpu_holds_what_its_plan_says": 3,
    },
    "streams/test_two_hop_streams.py": {
        "test_without_it_a_mistake_is_found": 3,
    },
    "streams/test_update_order.py": {
        "test_it_comes_after_all_that_it_depends_on": 2,
    },
    "streams/test_values_of_two_ranks.py": {
        "test_values_are_those_of_two_cpu_ranks": 2,
    },
    "unit/test_deepspeed_damage.py": {
        "test_a_damaged_byte_never_gives_another_value": 2,
    },
    "unit/test_deepspeed_import.py": {
        "test_junk_under_any_key_ends_in_an_error_or_in_values": 1,
    },
    "unit/test_device_update.py": {
        "test_training_has_the_bits_of_the_optimizers_own_step": 2,
        "test_two_ranks": 1,
    },
    "unit/test_env.py": {
        "test_ranks_on_one_host_need_no_address": 1,
    },
    "unit/test_malloc.py": {
        "test_large_blocks_of_cpu_ranks_are_outside_the_heap": 1,
    },
    "unit/test_native_threads.py": {
        "test_the_interpreter_ends_well_whatever_the_threads_do": 1,
    },
    "unit/test_onepass.py": {
        "test_pieces_give_the_bits_of_the_optimizers_own_step": 20,
        "test_the_compiled_update_gives_the_same_bits": 12,
    },
    "unit/test_overlap_table.py": {
        "test_each_layer_is_gathered_twice_ahead_of_its_use_and_reduced_once": 2,
    },
    "unit/test_own_forward.py": {
        "test_stages_in_a_row_are_the_model": 3,
    },
    "unit/test_plan_changes.py": {
        "test_with_each_of_three_printed_changes_the_plan_fits": 1,
    },
    "unit/test_plan_cli.py": {
        "test_a_configuration_that_fits_is_found_and_does_fit": 0,
    },
    "unit/test_plan_published.py": {
        "test_a_row_is_planned_as_the_page_says": 0,
    },
    "unit/test_positions.py": {
        "test_the_limit_is_that_of_the_real_model": (
            "GPT2",
            "OPT",
            "Bart",
            "Roberta",
            "MPNet",
            "Mpt",
        ),
    },
    "unit/test_report.py": {
        "test_a_page_of_sixty_engines_is_two_megabytes_at_most": 0,
        "test_a_hundred_thousand_steps_are_two_megabytes_at_most": 0,
    },
    "unit/test_triton_update.py": {
        "test_a_mistake_in_the_kernel_is_found": 3,
        "test_it_has_the_bits_of_the_cpus_update": 4,
    },
    "zoo/test_zoo.py": {
        "test_one_rank_is_plain_pytorch_bit_for_bit": 54,
    },
}
"""How many rows stay of each test, by its file; 0: it runs in `make test-full` only.

Texts: all rows stay whose names begin with one of them, at all ZeRO stages.
"""

"""Names of fields that today's clients send, by the server whose API has them. Facts, as of 2026."""

FIELDS = {
    "OpenAI, chat": """
        audio frequency_penalty function_call functions logit_bias logprobs max_completion_tokens max_tokens messages metadata
        modalities model moderation n parallel_tool_calls prediction presence_penalty prompt_cache_key prompt_cache_options
        prompt_cache_retention reasoning_effort response_format safety_identifier seed service_tier stop store stream
        stream_options temperature tool_choice tools top_logprobs top_p user verbosity web_search_options""",
    "OpenAI, text": """
        best_of echo frequency_penalty logit_bias logprobs max_tokens model n presence_penalty prompt seed stop stream
        stream_options suffix temperature top_p user""",
    "OpenRouter": """
        models route provider transforms plugins preset prompt prediction min_p top_a top_k repetition_penalty reasoning
        reasoning_effort include_reasoning usage session_id structured_outputs verbosity trace cache_control debug image_config
        max_price zdr web_search_options""",
    "vLLM": """
        add_generation_prompt add_special_tokens allowed_token_ids bad_words cache_salt chat_template chat_template_kwargs
        continue_final_message documents ec_transfer_params echo guided_choice guided_decoding_backend guided_grammar
        guided_json guided_regex guided_whitespace_pattern ignore_eos include_reasoning include_stop_str_in_output
        kv_transfer_params
        length_penalty logits_processors logprob_token_ids media_io_kwargs min_p min_tokens mm_processor_kwargs priority
        prompt_embeds prompt_logprobs repetition_detection repetition_penalty request_id return_mm_kwargs return_prompt_text
        return_token_ids return_token_offsets return_tokens_as_token_ids routed_experts_prompt_start session_id
        skip_special_tokens spaces_between_special_tokens stop_token_ids stream_interval structural_tag structured_outputs
        thinking_token_budget top_k truncate_prompt_tokens truncation_side use_beam_search vllm_xargs watermarking""",
    "SGLang": """
        bootstrap_host bootstrap_port bootstrap_room cache_salt chat_template_kwargs continue_final_message
        custom_logit_processor custom_params data_parallel_rank disagg_prefill_dp_rank ebnf extra_key ignore_eos images_config
        input_embeds input_ids json_schema lora_path max_dynamic_patch min_dynamic_patch min_p min_tokens ngram_corpus_id
        no_stop_trim priority regex repetition_penalty return_cached_tokens_details return_hidden_states return_meta_info
        return_prompt_token_ids return_routed_experts rid routed_dp_rank routed_experts_start_len separate_reasoning session_id
        session_params skip_special_tokens stop_regex stop_token_ids stream_reasoning task top_k use_audio_in_video""",
    "llama.cpp": """
        cache_prompt chat_format chat_template_kwargs dry_allowed_length dry_base dry_multiplier dry_penalty_last_n
        dry_sequence_breakers dynatemp_exponent dynatemp_range grammar grammar_lazy grammar_triggers id_slot ignore_eos
        image_data input_extra input_prefix input_suffix json_schema lora min_keep min_p mirostat mirostat_eta mirostat_tau
        n_cache_reuse n_cmpl n_discard n_indent n_keep n_predict n_probs parse_tool_calls post_sampling_probs preserved_tokens
        reasoning_budget reasoning_format repeat_last_n repeat_penalty response_fields return_progress return_tokens samplers
        slot_id t_max_predict_ms t_max_prompt_ms thinking_forced_open timings_per_token top_k top_n_sigma typical_p
        xtc_probability xtc_threshold""",
    "Mistral, DeepSeek, xAI, Fireworks, Ollama, LiteLLM, rerankers": """
        context_length_exceeded_behavior deferred fallbacks format include_usage keep_alive mock_response num_retries options
        perf_metrics_in_response prompt_mode prompt_truncate_len random_seed safe_prompt search_parameters tags think thinking
        timeout top_n user_id""",
}

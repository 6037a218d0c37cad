# Flags for every C target of the project: link to ep_flags.
add_library(ep_flags INTERFACE)
target_compile_definitions(ep_flags INTERFACE _GNU_SOURCE)
target_compile_options(ep_flags INTERFACE
  $<$<COMPILE_LANGUAGE:C>:-Wall -Wextra -Wshadow -Wconversion -Wvla -Wstrict-prototypes
    -fno-strict-aliasing -fno-omit-frame-pointer>)
if(EP_WERROR)
  target_compile_options(ep_flags INTERFACE $<$<COMPILE_LANGUAGE:C>:-Werror>)
endif()
if(EP_SANITIZE)
  target_compile_options(ep_flags INTERFACE $<$<COMPILE_LANGUAGE:C>:-fsanitize=${EP_SANITIZE} -fno-sanitize-recover=all>)
  target_link_options(ep_flags INTERFACE -fsanitize=${EP_SANITIZE})
endif()
if(EP_FUZZ)
  target_compile_options(ep_flags INTERFACE $<$<COMPILE_LANGUAGE:C>:-fsanitize=fuzzer-no-link>)
endif()

# Sources that make and check numbers of rows, one by one.  To watch each would be most of what a test takes with the thread
# sanitizer; who uses a row too early or too late shows in these numbers themselves.
function(ep_computes)
  if(EP_SANITIZE STREQUAL "thread")
    set_source_files_properties(${ARGN} PROPERTIES COMPILE_OPTIONS -fno-sanitize=thread)
  endif()
endfunction()

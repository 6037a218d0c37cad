# ep_options: the configuration, a library so that its tests link it.
add_library(ep_options STATIC options.c options_file.c options_check.c options_table.c options_value.c files.c)
target_include_directories(ep_options PUBLIC ${CMAKE_CURRENT_SOURCE_DIR})
target_link_libraries(ep_options PUBLIC ep_base PRIVATE ep_flags ep_kernels ep_store_url PkgConfig::YAML
                      PkgConfig::JANSSON)

add_executable(ep-server main.c daemon.c)
target_compile_definitions(ep-server PRIVATE EP_VERSION="${PROJECT_VERSION}" EP_COMMIT="${EP_COMMIT}")
target_link_libraries(ep-server PRIVATE ep_flags ep_options ep_server_api ep_server_attach
                      ep_server_metrics ep_server_group ep_server_cluster ep_server_store ep_server_node ep_rpc
                      PkgConfig::UV PkgConfig::SYSTEMD)
install(TARGETS ep-server RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})

# The unit names the program where it is installed, which `cmake --install --prefix` may say.
install(CODE "
  file(READ \"${CMAKE_CURRENT_LIST_DIR}/../deploy/systemd/ep-server.service\" unit)
  get_filename_component(folder \"\${CMAKE_INSTALL_PREFIX}\" ABSOLUTE)
  cmake_path(APPEND folder \"${CMAKE_INSTALL_BINDIR}\")
  string(REPLACE /usr/bin/ep-server \"\${folder}/ep-server\" unit \"\${unit}\")
  file(WRITE \"${CMAKE_CURRENT_BINARY_DIR}/ep-server.service\" \"\${unit}\")")
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/ep-server.service
        DESTINATION lib/systemd/system)
install(FILES ${CMAKE_CURRENT_LIST_DIR}/../deploy/systemd/ep-server.tmpfiles.conf
        DESTINATION lib/tmpfiles.d RENAME ep-server.conf)
install(FILES ${CMAKE_CURRENT_LIST_DIR}/../deploy/systemd/ep-server.yaml
        DESTINATION ${CMAKE_INSTALL_DATADIR}/ep-server/examples)
